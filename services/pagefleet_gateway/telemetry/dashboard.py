"""`GET /`: a page for people, which shows what `GET /status` says, once a second.

The page is static, holds no data and asks nothing of other hosts, so it needs no key; `/status`
does.
"""

from importlib.resources import files
from typing import Final

import msgspec

from pagefleet.wire import EngineStats

PAGE: Final = files("pagefleet_gateway.telemetry").joinpath("dashboard.html").read_bytes()

PAGE_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; "
        "script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
}


class EngineStatus(msgspec.Struct):
    """A worker's figures; see `pagefleet.wire.EngineStats`."""

    engine: int
    running: int
    blocks: int
    used_blocks: int
    cached_blocks: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int

    @classmethod
    def of(cls, stats: EngineStats) -> "EngineStatus":
        """The same figures, by name."""
        return cls(*(getattr(stats, name) for name in cls.__struct_fields__))


class Status(msgspec.Struct, kw_only=True):
    """The answer of `/status`."""

    model: str
    version: str
    state: str
    """In words."""
    workers: int
    running: int
    waiting: int
    open: int
    """Requests that this gateway is answering."""
    tokens_per_second: float
    """Generated tokens that came through this gateway, over the last seconds."""
    engines: list[EngineStatus]


class Rate:
    """Events per second over the last `SECONDS` whole seconds."""

    SECONDS: Final = 5

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, count: int, now: float) -> None:
        """So many happened at `now`, in seconds of any clock."""
        second = int(now)
        if second not in self._counts:
            self._forget(second)
            self._counts[second] = 0
        self._counts[second] += count

    def per_second(self, now: float) -> float:
        """As of `now`; the second that is not over does not count."""
        self._forget(int(now))
        counted = sum(self._counts.values()) - self._counts.get(int(now), 0)
        return counted / self.SECONDS

    def _forget(self, second: int) -> None:
        for old in [each for each in self._counts if each < second - self.SECONDS]:
            del self._counts[old]
