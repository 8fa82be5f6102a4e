"""`GET /memory`: how the cell's memory is used and who waits for it, as the scheduler sees it now.

With `?blocks=true` every worker's `map` has a character a block: `.` free, `c` cached, else in how
many tables it is (`+`: ten or more). The fields are those of `pagefleet.wire.Snapshot`.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagefleet.wire import CACHED_BLOCK, Snapshot, Wait, WaitingSequence, WorkerMemory
from pagefleet_gateway.errors import unavailable
from pagefleet_gateway.http.facts import as_json
from pagefleet_gateway.http.gateway import Gateway

_CHARACTER = [".", *"123456789"] + ["+"] * (CACHED_BLOCK - 10) + ["c"]


class PoolUse(msgspec.Struct):
    """Of one worker; see `pagefleet.wire.WorkerMemory`."""

    engine: int
    running: int
    slots: int
    block_size: int
    blocks: int
    free: int
    cached: int
    holders: dict[int, int]
    empty_slots: int
    host_blocks: int
    host_cached: int
    copies: int
    preemptions: int
    swapped_out: int
    swapped_in: int
    map: str

    @classmethod
    def of(cls, memory: WorkerMemory) -> "PoolUse":
        """The same, by name."""
        fields = {name: getattr(memory, name) for name in cls.__struct_fields__}
        fields["map"] = "".join(_CHARACTER[state] for state in memory.map)
        return cls(**fields)


class Waiting(msgspec.Struct):
    """One sequence that waits; see `pagefleet.wire.WaitingSequence`."""

    request: str
    choices: list[int]
    seconds: float
    tokens: int
    losses: int
    reason: Wait
    wanted: int
    available: int

    @classmethod
    def of(cls, waiting: WaitingSequence) -> "Waiting":
        """The same, by name."""
        return cls(*(getattr(waiting, name) for name in cls.__struct_fields__))


class Memory(msgspec.Struct):
    """The answer of `/memory`."""

    workers: list[PoolUse]
    waiting: list[Waiting]

    @classmethod
    def of(cls, snapshot: Snapshot) -> "Memory":
        """The same, by name."""
        return cls(
            [PoolUse.of(each) for each in snapshot.workers],
            [Waiting.of(each) for each in snapshot.waiting],
        )


class MemoryRoute:
    """The endpoint."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def show(self, request: Request) -> Response:
        """Ask the scheduler."""
        blocks = request.query_params.get("blocks", "false") == "true"
        try:
            snapshot = await self._gateway.client.inspect(blocks)
        except TimeoutError as error:
            raise unavailable("No scheduler answers.", "no_scheduler") from error
        return as_json(Memory.of(snapshot))
