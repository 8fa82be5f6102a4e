"""Keeps child processes alive, and ends them together.

A child that dies is started again after a pause; pauses double from 0.2 s to 5 s and begin anew
once the child has lived for 30 s. A child that exits with status 2 says that what it was told is
wrong: another start cannot mend that, so it ends them all.

Children stand in stages, in order of their start. They are drained in reverse: a stage gets SIGTERM
when those after it have ended, and is kept alive until then, because the later ones still work with
it. What has not ended at the deadline is killed. SIGINT, SIGTERM and SIGHUP drain; a SIGINT during
the drain (a second Ctrl-C) kills at once. A second SIGTERM does not, because timeout(1) and others
send it to a process and to its group.
"""

import asyncio
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from pagefleet_launcher.process import Process, describe, say

FIRST_PAUSE = 0.2
LONGEST_PAUSE = 5.0
SETTLED_AFTER = 30.0
MISCONFIGURED = 2
"""The exit status of a service whose settings are wrong (`pagefleet.settings.parse`)."""


def next_pause(last: float, lived: float) -> float:
    """Seconds before the next start of a child that lived for `lived` after a pause of `last`."""
    if lived >= SETTLED_AFTER:
        return FIRST_PAUSE
    return min(max(FIRST_PAUSE, 2 * last), LONGEST_PAUSE)


class Interrupts:
    """The signals that ask for an end: `drain` is set by the first, `kill` by a second Ctrl-C."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.kill = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._note, number)

    def _note(self, number: signal.Signals) -> None:
        if self.drain.is_set() and number == signal.SIGINT:
            self.kill.set()
        self.drain.set()


class Child:
    """A process that is started again whenever it dies, until it is told to stop."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.command = command
        self.fds = fds
        self.environment = environment
        self._process: Process | None = None
        self._stopping = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Child {self.name} {self._process or 'not running'}>"

    async def keep_alive(self) -> None:
        """Run it until `stop` or `kill`, or until it is misconfigured."""
        pause = 0.0
        while not self._stopping.is_set():
            born = time.monotonic()
            status = await self._run()
            if self._stopping.is_set():
                return
            if status == MISCONFIGURED:
                say("serve", f"{self.name} refuses its settings and says why above; all end")
                return
            pause = next_pause(pause, time.monotonic() - born)
            say("serve", f"{self.name} {describe(status)}; it starts again in {pause:g} s")
            await first_of(asyncio.sleep(pause), self._stopping.wait())

    async def _run(self) -> int:
        self._process = Process(self.name, self.command, fds=self.fds, environment=self.environment)
        try:
            return await self._process.ended()
        finally:
            self._process = None

    def stop(self) -> None:
        """Ask it to end, for good."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End it at once, for good."""
        self._stopping.set()
        if self._process is not None:
            self._process.kill()


class Supervisor:
    """Runs `stages` of children; `drain_timeout` is in seconds."""

    def __init__(self, stages: Sequence[Sequence[Child]], drain_timeout: float) -> None:
        self._stages = stages
        self._drain_timeout = drain_timeout
        self._running: dict[Child, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Supervisor {[child for stage in self._stages for child in stage]}>"

    async def run(self, interrupts: Interrupts) -> int:
        """Run until interrupted or misconfigured, then end them all.

        Returns the status to exit with: 0 if all ended by themselves, 1 if one had to be killed, 2
        if one was misconfigured.
        """
        for stage in self._stages:
            for child in stage:
                self._running[child] = asyncio.create_task(child.keep_alive())
        # Before anything is told to stop, only a misconfigured child ends for good.
        await first_of(interrupts.drain.wait(), self._any_ended())
        misconfigured = any(task.done() for task in self._running.values())
        say("serve", "ending, once open streams have ended; Ctrl-C ends it at once")
        await first_of(self._drain(), interrupts.kill.wait())
        killed = self._kill()
        await asyncio.gather(*self._running.values())
        return MISCONFIGURED if misconfigured else int(killed)

    async def _any_ended(self) -> None:
        await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_timeout
        for stage in reversed(self._stages):
            for child in stage:
                child.stop()
            tasks = [self._running[child] for child in stage]
            await asyncio.wait(tasks, timeout=max(0.0, deadline - loop.time()))

    def _kill(self) -> bool:
        late = [child for child, task in self._running.items() if not task.done()]
        for child in late:
            say("serve", f"{child.name} has not ended; it is killed")
            child.kill()
        return bool(late)


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
