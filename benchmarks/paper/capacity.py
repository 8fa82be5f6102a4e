"""How many requests a second a system serves within a given latency (the paper's section 6.2)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles

from benchmarks.loadgen.lengths import LengthSource
from benchmarks.paper.simulation import Cost, Measures, System, simulate
from benchmarks.paper.traffic import poisson

THRESHOLDS = (0.1, 0.2, 0.5, 1.0)
"""Seconds a token: the paper names none, so the whole range is looked at."""

RATE_STEP = 1.25


@dataclass(frozen=True, slots=True)
class Point:
    """A system at one rate; seconds, each as p50 and p99 where there are two."""

    rate: float
    latency: float
    """Mean of the requests' end-to-end seconds a token."""
    first_token: tuple[float, float]
    gap: tuple[float, float]

    @classmethod
    def of(cls, rate: float, measures: Measures) -> "Point":
        """What a run showed."""
        first_token = _p50_p99(measures.first_tokens)
        return cls(rate, measures.latency, first_token, _p50_p99(measures.gaps))


def latency_curve(
    make: Callable[[], System],
    lengths: LengthSource,
    cost: Cost,
    seconds: float,
    seed: int,
    rate: float,
) -> list[Point]:
    """Points of rising rates, from `rate` on, until the largest of the thresholds is passed."""
    points: list[Point] = []
    while not points or points[-1].latency < THRESHOLDS[-1]:
        jobs = poisson(lengths, rate, seconds, seed)
        points.append(Point.of(rate, simulate(make(), jobs, cost)))
        rate *= RATE_STEP
    return points


def capacity(points: Sequence[Point], threshold: float) -> float:
    """The rate at which the curve passes the threshold, between two points on logarithmic axes.

    0 if the first point lies above it.
    """
    for below, above in pairwise(points):
        if below.latency <= threshold < above.latency:
            whole = math.log(above.latency / below.latency)
            part = math.log(threshold / below.latency) / whole
            return below.rate * math.pow(above.rate / below.rate, part)
    return 0.0


def last_within(points: Sequence[Point], threshold: float) -> Point | None:
    """The point of the highest rate before the curve passes the threshold."""
    within = None
    for point in points:
        if point.latency >= threshold:
            break
        within = point
    return within


def _p50_p99(seconds: Sequence[float]) -> tuple[float, float]:
    if len(seconds) < 2:
        return math.nan, math.nan
    cuts = quantiles(seconds, n=100)
    return cuts[49], cuts[98]
