"""Which worker gets a sequence: the one that has the least to do, counting what it need not do."""

from collections.abc import Iterable

from pagefleet_scheduler.planner import Planner
from pagefleet_scheduler.sequence import Sequence


def choose(sequence: Sequence, planners: Iterable[Planner]) -> Planner | None:
    """The best of those that can run the sequence now; None if none can.

    Cost is in tokens to compute before the sequence's own next one: what the worker's running
    sequences still have to feed, and the sequence's share that its prefix cache does not hold.
    """
    able = [planner for planner in planners if planner.can_admit(sequence)]
    return min(able, key=lambda planner: _cost(sequence, planner), default=None)


def _cost(sequence: Sequence, planner: Planner) -> int:
    queued = sum(max(running.pending, 1) for running in planner.running)
    return queued + len(sequence.tokens) - planner.hits(sequence)
