"""What all runs of the paper's experiments gave, by what was run; lists are by seed."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.paper.capacity import Point, capacity
from benchmarks.paper.simulation import Average

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _lists() -> "defaultdict[_Key, list[_Value]]":
    return defaultdict(list)


@dataclass
class Outcome:
    """All figures, as they are measured."""

    batching: dict[tuple[str, str], list[tuple[Average, Average]]] = field(default_factory=_lists)
    """Of traffic and system: over all the time, and while requests waited."""
    serving: dict[tuple[str, str], list[list[Point]]] = field(default_factory=_lists)
    """Of cost model and system: the latency curve."""
    sharing: dict[tuple[str, str, int], list[float]] = field(default_factory=_lists)
    """Of kind, traffic and ways: percent of the blocks that sharing saves."""

    @property
    def costs(self) -> list[str]:
        """The cost models."""
        return list(dict.fromkeys(cost for cost, _ in self.serving))

    def batch(self, traffic: str, system: str) -> list[float]:
        """Requests in the batch on average, over all the time."""
        return [overall.batch for overall, _ in self.batching[traffic, system]]

    def full_batch(self, traffic: str, system: str) -> list[float]:
        """Requests in the batch on average, while others waited."""
        return [full.batch for _, full in self.batching[traffic, system]]

    def shares(self, traffic: str, system: str, use: str) -> list[float]:
        """Percent of the slots that have this use (a field of `Usage`), while requests waited."""
        return [100 * getattr(full.usage, use) for _, full in self.batching[traffic, system]]

    def capacities(self, cost: str, system: str, threshold: float) -> list[float]:
        """Requests a second that are served within so many seconds a token."""
        return [capacity(curve, threshold) for curve in self.serving[cost, system]]
