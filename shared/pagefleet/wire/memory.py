"""Snapshots of memory: what a gateway may ask the scheduler for people who look inside."""

from enum import StrEnum

from pagefleet.wire.parts import Message, Part


class Inspect(Message, frozen=True):
    """How is memory used, and who waits for it? Answered by `Snapshot`."""

    query: int
    """The asker's number for it, which the answer repeats."""
    blocks: bool = False
    """Whether to tell about every single block, too."""


class WorkerMemory(Part, frozen=True):
    """One worker's pool at this moment; counters began when it joined."""

    engine: int
    """See `EngineStats`."""
    running: int
    """Sequences that have a slot."""
    slots: int
    block_size: int
    blocks: int
    free: int
    """Blocks whose content is of no use."""
    cached: int
    """Blocks that nobody holds, kept for their content."""
    holders: dict[int, int]
    """The other blocks: how many are in the tables of one sequence, of two, ..."""
    empty_slots: int
    """Token slots of these blocks that hold no token: the waste of paging."""
    host_blocks: int
    """Of the pool in host memory."""
    host_cached: int
    copies: int
    """Blocks copied because one of their holders wrote to them."""
    preemptions: int
    swapped_out: int
    """Blocks moved to the host pool."""
    swapped_in: int
    map: bytes = b""
    """If asked for, a byte per block: its holders (254: so many or more), or `CACHED_BLOCK`."""


CACHED_BLOCK = 255
"""In `WorkerMemory.map`: held by nobody, kept for its content."""


class Wait(StrEnum):
    """What a sequence that has no blocks waits for."""

    WORKER = "worker"
    """No worker has joined."""
    LARGER_WORKER = "larger_worker"
    """No worker's pool can hold it."""
    CLIENT = "client"
    """Its client has not taken the tokens that it has."""
    RESULT = "result"
    """A step that it took part in before it lost its blocks is not back."""
    TURN = "turn"
    """Others go first, who wait as well."""
    SLOT = "slot"
    """No worker has a slot to spare."""
    BLOCKS = "blocks"
    """No worker has so many blocks to spare."""


class WaitingSequence(Part, frozen=True):
    """Why a sequence is not running."""

    request: str
    choices: list[int]
    seconds: float
    """Since its request came."""
    tokens: int
    """Of its prompt and outputs: so many positions have to be computed, less those cached."""
    losses: int
    """How often it lost its blocks."""
    reason: Wait
    wanted: int = 0
    """Blocks that it needs, with those that admission keeps to spare."""
    available: int = 0
    """Blocks that are available, at the worker that lacks fewest."""


class Snapshot(Message, frozen=True):
    """Every worker's pool, and every sequence that waits, in the queue's order."""

    epoch: int
    query: int
    workers: list[WorkerMemory]
    waiting: list[WaitingSequence]
