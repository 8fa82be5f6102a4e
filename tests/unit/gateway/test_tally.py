"""Tallies give Prometheus exactly what prometheus-client's own classes would."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pagefleet_gateway.telemetry.tally import CounterTally, HistogramTally

LABELS = {"model_name": "m", "engine": "all"}
BOUNDS = (0.001, 0.5, 1.0, 30.0)


@given(
    values=st.lists(st.sampled_from(BOUNDS) | st.floats(0, 100), max_size=20),
    counts=st.lists(st.integers(0, 10**6), max_size=5),
)
def test_tallies_are_written_like_the_librarys_metrics(
    values: list[float], counts: list[int]
) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counter = CounterTally("things", "Things.", LABELS)
    histogram = HistogramTally("seconds", "Time.", LABELS, BOUNDS)
    ours.register(counter)
    ours.register(histogram)
    their_counter = Counter("things", "Things.", LABELS, registry=theirs).labels(**LABELS)
    their_histogram = Histogram("seconds", "Time.", LABELS, buckets=BOUNDS, registry=theirs)
    for count in counts:
        counter.inc(count)
        their_counter.inc(count)
    for value in values:
        histogram.observe(value)
        their_histogram.labels(**LABELS).observe(value)
    their_histogram.labels(**LABELS)
    lines = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == lines
