"""One service that is kept alive: started again when its process dies, replaced when it hangs.

A process that dies is started again after a pause. Pauses double from 0.2 s to 5 s, and begin anew
after a process that lived for 5 s. One that cannot be started, because the system has no process or
descriptor left, is tried again likewise. One that exits with status 2 says that its settings are
wrong, which another start would not mend; unless the same settings made it ready once: then it is
the world that changed (a full disk, a file server that is away, memory that its predecessor has not
released yet), and it may change back.

A process that has given signs of life (signs.py) and then gives none for `hang_timeout` is hung: it
is killed, and started again once it is gone. The time is counted in looks at the process, not read
from a clock, so that a process is not blamed for time in which the launcher itself did not run.
"""

import asyncio
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagefleet_launcher.process import Process, describe
from pagefleet_launcher.saying import say

FIRST_PAUSE = 0.2
LONGEST_PAUSE = 5.0
SETTLED_AFTER = 5.0
"""Seconds of life after which a death is bad luck, and not that of a service that cannot run."""

MISCONFIGURED = 2
"""The exit status of a service whose settings are wrong (`pagefleet.command_line.parse`)."""

_LOOKS = 20
"""How many looks at a process there are within its `hang_timeout`."""


def next_pause(last: float, lived: float) -> float:
    """Seconds before the next start of a child that lived for `lived` after a pause of `last`."""
    if lived >= SETTLED_AFTER:
        return FIRST_PAUSE
    return min(max(FIRST_PAUSE, 2 * last), LONGEST_PAUSE)


@dataclass(frozen=True)
class Service:
    """What a child runs, and how it is to be treated."""

    name: str
    command: Sequence[str]
    fds: Sequence[int] = ()
    """Descriptors that it inherits."""
    environment: Mapping[str, str] | None = None
    """Variables to add to ours."""
    hang_timeout: float = 0.0
    """Seconds without a sign of life after which it counts as hung; 0: never."""
    overlaps: bool = True
    """Whether a successor may start while it still runs; not if both need the same address."""
    retirement: signal.Signals = signal.SIGTERM
    """The signal that asks it to end when a successor is ready."""


class Child:
    """A service whose process is started again whenever it dies, until it is told to stop.

    predecessor: the child whose place this one will take, as long as that still runs.
    """

    def __init__(self, service: Service, predecessor: "Child | None" = None) -> None:
        self.service = service
        self.predecessor = predecessor
        self.ready = asyncio.Event()
        """Set once it has said that it is ready."""
        self.failed = asyncio.Event()
        """Set once it has ended by itself."""
        self._process: Process | None = None
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Child {self.name} {self._process or 'not running'}>"

    @property
    def name(self) -> str:
        """Of its service."""
        return self.service.name

    async def keep_alive(self) -> bool:
        """Run it until `stop` or `kill`; False if it refuses its settings and was never ready."""
        pause = 0.0
        while not self._stopping.is_set():
            born, status = time.monotonic(), None
            try:
                status = await self._run()
                end = describe(status)
            except OSError as error:
                end = f"cannot be started ({error.strerror})"
            if self._stopping.is_set():
                break
            self.failed.set()
            if status == MISCONFIGURED and not self.ready.is_set():
                return False
            pause = next_pause(pause, time.monotonic() - born)
            say("serve", f"{self.name} {end}; it starts again in {pause:g} s")
            await first_of(asyncio.sleep(pause), self._stopping.wait())
        return True

    async def _run(self) -> int:
        service = self.service
        process = self._process = Process(
            service.name, service.command, fds=service.fds, environment=service.environment
        )
        watches = [asyncio.create_task(self._await_ready(process))]
        if service.hang_timeout:
            watches.append(asyncio.create_task(self._watch(process)))
        try:
            return await process.ended()
        finally:
            self._process = None
            for watch in watches:
                watch.cancel()

    async def _await_ready(self, process: Process) -> None:
        await process.signs.ready.wait()
        self.ready.set()

    async def _watch(self, process: Process) -> None:
        seen = missed = 0
        while missed < _LOOKS:
            await asyncio.sleep(self.service.hang_timeout / _LOOKS)
            count = process.signs.count
            missed = missed + 1 if 0 < count == seen else 0
            seen = count
        say("serve", f"{self.name} hangs: no sign of life for {self.service.hang_timeout:g} s")
        process.kill()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end, for good."""
        self._stopping.set()
        if self._process is not None:
            self._process.send(number)

    def kill(self) -> None:
        """End it at once, for good."""
        self._stopping.set()
        if self._process is not None:
            self._process.kill()


async def first_of(*awaitables: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first of these to return; cancel the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
