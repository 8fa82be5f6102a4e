"""A snapshot of memory: what every block of every pool is for, and why each sequence waits."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pagefleet.wire import (
    CACHED_BLOCK,
    Inspect,
    Snapshot,
    Wait,
    WaitingSequence,
    WorkerMemory,
)
from pagefleet_scheduler.capacity import Capacity
from pagefleet_scheduler.placement import Placement
from pagefleet_scheduler.planner import Planner
from pagefleet_scheduler.sequence import Sequence as Stream


def take_snapshot(
    epoch: int, inspect: Inspect, workers: Mapping[int, Planner], placement: Placement, now: float
) -> Snapshot:
    """Answer an `Inspect`; changes nothing.

    Args:
        epoch: the scheduler's.
        inspect: what was asked.
        workers: planners by their workers' numbers.
        placement: of the same planners.
        now: seconds on the scheduler's clock.
    """
    return Snapshot(
        epoch,
        inspect.query,
        [_memory(number, planner, inspect.blocks) for number, planner in workers.items()],
        list(_waiting(placement, now)),
    )


def empty_slots(streams: Iterable[Stream], block_size: int) -> int:
    """Token slots without a token in these sequences' blocks; a shared block counts once."""
    filled: dict[int, int] = {}
    for stream in streams:
        whole = stream.ordered // block_size
        for index, block in enumerate(stream.table[whole:], whole):
            filled[block] = max(stream.ordered - index * block_size, 0)
    return len(filled) * block_size - sum(filled.values())


def _memory(number: int, planner: Planner, with_map: bool) -> WorkerMemory:
    pool, host, worker = planner.cache.pool, planner.cache.host, planner.worker
    references = Counter(block for stream in planner.running for block in stream.table)
    return WorkerMemory(
        engine=number,
        running=len(planner.running),
        slots=worker.slots,
        block_size=pool.block_size,
        blocks=pool.blocks,
        free=pool.blocks - pool.held - pool.cached,
        cached=pool.cached,
        holders=dict(sorted(Counter(references.values()).items())),
        empty_slots=empty_slots(planner.running, pool.block_size),
        host_blocks=host.pool.blocks,
        host_cached=host.pool.cached,
        copies=planner.copies,
        preemptions=planner.preemptions,
        swapped_out=host.moved_out,
        swapped_in=host.moved_in,
        map=_map(planner, references) if with_map else b"",
    )


def _map(planner: Planner, references: Mapping[int, int]) -> bytes:
    pool = planner.cache.pool
    blocks = bytearray(pool.blocks)
    for block, tables in references.items():
        blocks[block] = min(tables, CACHED_BLOCK - 1)
    for block in pool.cached_blocks:
        blocks[block] = CACHED_BLOCK
    return bytes(blocks)


def _waiting(placement: Placement, now: float) -> Iterable[WaitingSequence]:
    """In the queue's order; each tells of the workers that no earlier one has reserved."""
    reserved: set[Capacity] = set()
    for stream in placement.waiting:
        free = placement.free(stream, reserved)
        reason = _reason(stream, placement, free)
        if reason not in _RESERVES_NONE:
            reserved.update(placement.waiting.capacities(stream))
        wanted, available = _shortage(stream, free) if reason is Wait.BLOCKS else (0, 0)
        yield WaitingSequence(
            request=stream.request.id,
            choices=list(stream.choices),
            seconds=now - stream.request.arrived,
            tokens=len(stream.tokens),
            losses=stream.run,
            reason=reason,
            wanted=wanted,
            available=available,
        )


_RESERVES_NONE = (Wait.WORKER, Wait.LARGER_WORKER, Wait.CLIENT)
"""Reasons for which a sequence reserves no worker (`Placement.admit`)."""


def _reason(stream: Stream, placement: Placement, free: Sequence[Planner]) -> Wait:
    """`free`: workers at which it could run, and that no earlier one has reserved."""
    if not placement.planners:
        return Wait.WORKER
    if placement.fits_nowhere(stream.request):
        return Wait.LARGER_WORKER
    if stream.paused:
        return Wait.CLIENT
    if not free:
        return Wait.TURN
    if stream.flying:
        return Wait.RESULT
    if not any(planner.has_slot for planner in free):
        return Wait.SLOT
    return Wait.BLOCKS


def _shortage(stream: Stream, planners: Sequence[Planner]) -> tuple[int, int]:
    """Blocks wanted and available, at the worker that lacks fewest."""
    figures = [
        (planner.wanted(stream), planner.cache.pool.available)
        for planner in planners
        if planner.has_slot
    ]
    return min(figures, key=lambda each: each[0] - each[1])
