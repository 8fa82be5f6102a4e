"""A cell under `pagefleet serve`, as a child of this process, with what it writes."""

import asyncio
import json
import os
import re
import sys
import urllib.error
import urllib.request
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.drill.processes import children, descriptors
from benchmarks.loadgen.recording import Server

START_SECONDS = 120.0
END_SECONDS = 60.0

_ADDRESS = re.compile(r"Pagefleet serves \S+ at (\S+)")
_SERVES = "gateway: Serving "
_BLOCKS = re.compile(r'^pagefleet_blocks\{.*state="(\w+)".*\} (\S+)$', re.MULTILINE)


class Served:
    """A running cell."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        """What its processes wrote, each with when it was read."""
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def server(self) -> Server:
        """Where requests go."""
        return Server.at(self.url.result())

    @property
    def services(self) -> dict[int, str]:
        """The name of each service by its pid, as of now."""
        return children(self.process.pid)

    def descriptors(self) -> Counter[str]:
        """Open descriptors by service and kind: the most of any process of a service."""
        most: Counter[str] = Counter()
        for pid, name in [(self.process.pid, "launcher"), *self.services.items()]:
            most |= Counter({f"{name} {kind}": n for kind, n in descriptors(pid).items()})
        return most

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of an answer; 0 where there is none."""
        return await asyncio.to_thread(fetch, f"{self.url.result()}{path}")

    async def blocks(self) -> dict[str, int]:
        """Blocks of all workers by state."""
        total: dict[str, int] = {}
        for state, count in _BLOCKS.findall((await self.get("/metrics"))[1].decode()):
            total[state] = total.get(state, 0) + int(float(count))
        return total

    async def idle(self, workers: int, patience: float) -> bool:
        """Wait until so many workers are there and nothing is asked for; whether that came."""
        deadline = monotonic() + patience
        while monotonic() < deadline:
            status, body = await self.get("/health")
            if status == 200:
                health = json.loads(body)
                if health["workers"] == workers and not health["running"] + health["waiting"]:
                    return True
            await asyncio.sleep(0.25)
        return False

    async def listen(self, gateways: int, patience: float) -> bool:
        """Wait until so many gateways have said that they serve; whether they have."""
        deadline = monotonic() + patience
        while sum(_SERVES in text for _, text in self.lines) < gateways:
            if monotonic() >= deadline:
                return False
            await asyncio.sleep(0.25)
        return True

    async def read(self) -> None:
        """Take in what it writes, until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip()
            self.lines.append((monotonic(), text))
            if (match := _ADDRESS.search(text)) and not self.url.done():
                self.url.set_result(match[1])


def fetch(url: str) -> tuple[int, bytes]:
    """Status and body of an answer over a new connection; 0 where there is none."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError:
        return 0, b""


@asynccontextmanager
async def serving(arguments: Sequence[str]) -> AsyncIterator[Served]:
    """Run `pagefleet serve` on a free port; ready when entered, ended when left.

    Raises:
        RuntimeError: it ended, or is not ready in time; with what it wrote.
    """
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("pagefleet")), "serve", "--port=0", *arguments),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        limit=1 << 20,
    )
    served = Served(process)
    reading = asyncio.create_task(served.read())
    try:
        ready: list[asyncio.Future[Any]] = [served.url, reading]
        await asyncio.wait(ready, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not served.url.done():
            raise RuntimeError("\n".join(text for _, text in served.lines) or "it writes nothing")
        yield served
    finally:
        if process.returncode is None:
            process.terminate()
        done, _ = await asyncio.wait([reading], timeout=END_SECONDS)
        if not done:
            process.kill()
        await process.wait()
