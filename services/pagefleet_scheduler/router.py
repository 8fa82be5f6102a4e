"""Which worker gets a sequence: the one that has the least to do, counting what it need not do."""

from collections.abc import Iterable

from pagefleet_scheduler.planner import Planner
from pagefleet_scheduler.sequence import Sequence

MISS = 8
"""How many queued tokens are worth one that has to be computed though another worker has it cached.

To queue delays one sequence. To compute again delays all that run there, and takes room in the
cache from what no other worker has. Measured by `benchmarks/routing.py` with 1, 4, 6 and 8.
"""


def choose(sequence: Sequence, planners: Iterable[Planner]) -> Planner | None:
    """The best of those that can run the sequence now; None if none can.

    Cost is in tokens: what the worker's running sequences still have to feed, and, weighted, the
    sequence's share that its prefix cache does not hold. Among equals goes the worker that has
    computed least so far, so that idle ones fill their caches alike.
    """
    able = [planner for planner in planners if planner.can_admit(sequence)]
    return min(able, key=lambda planner: _cost(sequence, planner), default=None)


def _cost(sequence: Sequence, planner: Planner) -> tuple[int, int]:
    queued = sum(max(running.pending, 1) for running in planner.running)
    misses = len(sequence.tokens) - planner.cache.found(sequence)
    return queued + MISS * misses, planner.prefix_queries - planner.prefix_hits
