"""How requests are offered: by a number of clients that wait for answers, or by the clock.

`Concurrency` is a closed loop: each client sends its next request when its last was answered, so
the server is always as busy as the number of clients. `PoissonRate` is an open loop: requests come
at random times whatever the server does, as from many users who do not know of each other, and a
server that is too slow builds up a queue. Times count from when a request was due, so that a late
start of the generator itself cannot flatter the server.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Protocol

from benchmarks.loadgen.workload import Request

Send = Callable[[Request, float], Awaitable[None]]
"""Sends a request that is due at a time and waits for its end, whatever that is."""


class Load(Protocol):
    """A way to offer requests."""

    async def offer(self, requests: Sequence[Request], send: Send, rng: random.Random) -> None:
        """Send all `requests` and wait for their answers."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """So many clients, each with one request at a time."""

    clients: int

    def __str__(self) -> str:
        return f"{self.clients} clients" if self.clients > 1 else "1 client"

    async def offer(self, requests: Sequence[Request], send: Send, rng: random.Random) -> None:
        """Share out the requests in order, each to the first client that is free."""
        waiting = iter(requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(self.clients):
                group.create_task(_client(waiting, send))


async def _client(waiting: Iterable[Request], send: Send) -> None:
    for request in waiting:
        await send(request, perf_counter())


@dataclass(frozen=True, slots=True)
class PoissonRate:
    """So many requests a second on average, at random times."""

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s"

    def arrivals(self, count: int, rng: random.Random) -> list[float]:
        """Seconds from the start to each of `count` arrivals of a Poisson process."""
        return list(accumulate(rng.expovariate(self.rate) for _ in range(count)))

    async def offer(self, requests: Sequence[Request], send: Send, rng: random.Random) -> None:
        """Send each request when it is due, whether or not others were answered."""
        start = perf_counter()
        async with asyncio.TaskGroup() as group:
            for request, arrival in zip(requests, self.arrivals(len(requests), rng), strict=True):
                due = start + arrival
                await asyncio.sleep(due - perf_counter())
                group.create_task(_once(request, due, send))


async def _once(request: Request, due: float, send: Send) -> None:
    await send(request, due)
