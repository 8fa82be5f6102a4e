"""Which worker gets a sequence: the one with the least work, less what its prefix cache spares."""

from collections.abc import Iterable

from pagefleet_scheduler.planner import Planner
from pagefleet_scheduler.sequence import Sequence

MISS = 8
"""How many queued tokens weigh as much as one token that is not in the worker's prefix cache.

Queueing delays one sequence. Computing what another worker has cached delays all that run there,
and takes room in the cache from what no other worker has. `benchmarks/routing.py` compared 1, 4, 6
and 8.
"""


class Queued(dict[Planner, int]):
    """Tokens that the running sequences of each worker still have to feed, counted on demand.

    Valid within one round of admission: call `admitted` after each, and `clear` after preemptions.
    """

    def __missing__(self, planner: Planner) -> int:
        count = self[planner] = sum(_queued(running) for running in planner.running)
        return count

    def admitted(self, sequence: Sequence, planner: Planner) -> None:
        """A sequence runs there from now on."""
        if planner in self:
            self[planner] += _queued(sequence)


def choose(sequence: Sequence, planners: Iterable[Planner], queued: Queued) -> Planner | None:
    """The best of those that can run the sequence now; None if none can.

    Cost is in tokens: those that the worker's running sequences still have to feed, and, `MISS`
    times, those of the sequence that its prefix cache does not hold. Among equals the worker wins
    that has computed least so far, so that idle workers fill their caches evenly.
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
