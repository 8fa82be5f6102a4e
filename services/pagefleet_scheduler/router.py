"""Which worker gets a sequence: the one that has the least to do, counting what it need not do."""

from collections.abc import Iterable

from pagefleet_scheduler.planner import Planner
from pagefleet_scheduler.sequence import Sequence

MISS = 8
"""How many queued tokens are worth one that has to be computed though another worker has it cached.

To queue delays one sequence. To compute again delays all that run there, and takes room in the
cache from what no other worker has. Measured by `benchmarks/routing.py` with 1, 4, 6 and 8.
"""


class Queued(dict[Planner, int]):
    """Tokens that the running sequences of each worker have still to feed, counted when asked for.

    Good for as long as no result and no plan comes in between; who admits and preempts says so.
    """

    def __missing__(self, planner: Planner) -> int:
        count = self[planner] = sum(_queued(running) for running in planner.running)
        return count

    def admitted(self, sequence: Sequence, planner: Planner) -> None:
        """One more runs there."""
        if planner in self:
            self[planner] += _queued(sequence)


def choose(sequence: Sequence, planners: Iterable[Planner], queued: Queued) -> Planner | None:
    """The best of those that can run the sequence now; None if none can.

    Cost is in tokens: what the worker's running sequences still have to feed, and, weighted, the
    sequence's share that its prefix cache does not hold. Among equals goes the worker that has
    computed least so far, so that idle ones fill their caches alike.
    """
    able = [planner for planner in planners if planner.can_admit(sequence)]
    if len(able) == 1:
        return able[0]
    return min(able, key=lambda planner: _cost(sequence, planner, queued[planner]), default=None)


def _cost(sequence: Sequence, planner: Planner, queued: int) -> tuple[int, int]:
    misses = len(sequence.tokens) - planner.cache.found(sequence)
    return queued + MISS * misses, planner.prefix_queries - planner.prefix_hits


def _queued(running: Sequence) -> int:
    return max(running.pending, 1)
