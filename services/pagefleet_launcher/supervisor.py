"""Keeps the processes of a cell alive, replaces them one by one, and ends them together.

Children (child.py) are grouped in stages, in order of their start. They are drained in reverse: a
stage gets SIGTERM when those after it have ended, and is kept alive until then, because the later
ones still need it. What has not ended at the deadline is killed. A child that is misconfigured ends
them all.

A rolling restart goes through all children. The successor of a child starts beside it. Only when
the successor is ready, the predecessor is asked to end, and has the time of a drain for that; if
both need the same address, the successor starts when the predecessor has ended. A successor that
does not become ready is given up, and its predecessor stays, so that a failed upgrade leaves what
worked.
"""

import asyncio
from collections.abc import Sequence

from pagefleet_launcher.child import MISCONFIGURED, Child, Service, first_of
from pagefleet_launcher.interrupts import Interrupts
from pagefleet_launcher.saying import say

START_SECONDS = 600.0
"""Time that a successor has to become ready: a large model takes minutes to load."""


class Supervisor:
    """Runs `stages` of services; `drain_timeout` is in seconds."""

    def __init__(self, stages: Sequence[Sequence[Service]], drain_timeout: float) -> None:
        self._stages = [[Child(service) for service in stage] for stage in stages]
        self._drain_timeout = drain_timeout
        self._running: dict[Child, asyncio.Task[None]] = {}
        self._misconfigured = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Supervisor {[child for stage in self._stages for child in stage]}>"

    async def run(self, interrupts: Interrupts) -> int:
        """Run until interrupted or misconfigured, then end them all.

        Returns the status to exit with: 0 if all ended when asked, 1 if one had to be killed, 2 if
        one was misconfigured.
        """
        for stage in self._stages:
            for child in stage:
                self._start(child)
        await first_of(
            interrupts.drain.wait(), self._misconfigured.wait(), self._roll_when_asked(interrupts)
        )
        misconfigured = self._misconfigured.is_set()
        say("serve", "ending, once open streams have ended; Ctrl-C ends it at once")
        await first_of(self._drain(), interrupts.kill.wait())
        killed = self._kill()
        await asyncio.gather(*self._running.values())
        return MISCONFIGURED if misconfigured else int(killed)

    def _start(self, child: Child) -> None:
        self._running[child] = asyncio.create_task(self._keep(child))

    async def _keep(self, child: Child) -> None:
        if not await child.keep_alive() and child.predecessor is None:
            say("serve", f"{child.name} refuses its settings and says why above; all end")
            self._misconfigured.set()

    # --- rolling restart ------------------------------------------------------------------------

    async def _roll_when_asked(self, interrupts: Interrupts) -> None:
        while True:
            await interrupts.restart.wait()
            interrupts.restart.clear()
            say("serve", "replacing all processes, one by one")
            if all([await self._roll(stage) for stage in self._stages]):
                say("serve", "all processes are replaced")

    async def _roll(self, stage: list[Child]) -> bool:
        return all([await self._replace(child, stage) for child in stage.copy()])

    async def _replace(self, old: Child, stage: list[Child]) -> bool:
        """Put a successor in a child's place; False if it did not become ready."""
        overlaps = old.service.overlaps
        if not overlaps:
            await self._retire(old, stage)
        new = Child(old.service, old if overlaps else None)
        stage.append(new)
        self._start(new)
        await first_of(new.ready.wait(), new.failed.wait(), asyncio.sleep(START_SECONDS))
        ready = new.ready.is_set()
        if overlaps and ready:
            new.predecessor = None
            await self._retire(old, stage)
        elif overlaps:
            say("serve", f"the new {new.name} did not become ready; the old one stays")
            new.kill()
            await self._leave(new, stage)
        return ready

    async def _retire(self, child: Child, stage: list[Child]) -> None:
        """Ask a child to end for good, and kill it if it takes too long."""
        child.stop(child.service.retirement)
        await asyncio.wait([self._running[child]], timeout=self._drain_timeout)
        if not self._running[child].done():
            say("serve", f"{child.name} has not ended; it is killed")
            child.kill()
        await self._leave(child, stage)

    async def _leave(self, child: Child, stage: list[Child]) -> None:
        stage.remove(child)
        await asyncio.wait([self._running[child]])  # if this is cancelled, the task is not
        self._running.pop(child).result()

    # --- the end --------------------------------------------------------------------------------

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
