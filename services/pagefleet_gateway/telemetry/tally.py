"""Prometheus metrics for what happens at every token, counted without locks.

One thread counts, that of the event loop, and the text for Prometheus is made by the same. So an
observation is a search in the bounds and two additions: a tenth of prometheus-client's own, whose
classes lock for threads and walk through all buckets.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class CounterTally(Collector):
    """A counter; `labels` maps names to values."""

    def __init__(self, name: str, help: str, labels: Mapping[str, str]) -> None:
        self._name = name
        self._help = help
        self._labels = labels
        self._value = 0

    def inc(self, count: int) -> None:
        """So many more."""
        self._value += count

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        family = CounterMetricFamily(self._name, self._help, labels=[*self._labels])
        family.add_metric([*self._labels.values()], self._value)
        yield family


class HistogramTally(Collector):
    """A histogram over `bounds`, which rise; a bucket holds what is at most its bound."""

    def __init__(
        self, name: str, help: str, labels: Mapping[str, str], bounds: Sequence[float]
    ) -> None:
        self._name = name
        self._help = help
        self._labels = labels
        self._bounds = [*bounds, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        names = map(floatToGoString, self._bounds)
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._help, labels=[*self._labels])
        family.add_metric([*self._labels.values()], buckets, self._sum)
        yield family
