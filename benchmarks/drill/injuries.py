"""Faults at random times: processes that are killed, or stopped for a while."""

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from benchmarks.drill.processes import is_alive, kill, state
from benchmarks.drill.served import Served

_PROOF_SECONDS = 0.05
"""After which what was done must be seen in /proc."""


@dataclass(frozen=True, slots=True)
class Injury:
    """Something that was done to a process."""

    when: float
    """Seconds of the monotonic clock."""
    service: str
    pid: int
    stopped: float | None
    """Seconds that it was stopped for; None: it was killed."""


@dataclass
class Injurer:
    """Kills and stops services of a cell, at the times of a Poisson process.

    Rates are per minute, `stops` the seconds to choose from.
    """

    served: Served
    targets: Sequence[str]
    kill_rate: float
    stop_rate: float
    stops: Sequence[float]
    draw: random.Random
    done: list[Injury] = field(default_factory=list)

    async def injure(self, seconds: float) -> None:
        """Go on for so long; whatever was stopped goes on at the end."""
        deadline = monotonic() + seconds
        rate = (self.kill_rate + self.stop_rate) / 60
        async with asyncio.TaskGroup() as group:
            while rate and (pause := self.draw.expovariate(rate)) < deadline - monotonic():
                await asyncio.sleep(pause)
                if (victim := self._victim()) is None:
                    continue
                if self.draw.random() * 60 * rate < self.kill_rate:
                    await self._kill(*victim)
                else:
                    group.create_task(self._stop(*victim))

    def _victim(self) -> tuple[int, str] | None:
        services = self.served.services.items()
        running = [(p, name) for p, name in services if name in self.targets and state(p) != "T"]
        return self.draw.choice(running) if running else None

    async def _kill(self, pid: int, service: str) -> None:
        when = monotonic()
        if not kill(pid):
            return
        await asyncio.sleep(_PROOF_SECONDS)
        if not is_alive(pid):
            self.done.append(Injury(when, service, pid, None))

    async def _stop(self, pid: int, service: str) -> None:
        seconds, when = self.draw.choice(self.stops), monotonic()
        try:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(_PROOF_SECONDS)
            if state(pid) == "T":
                self.done.append(Injury(when, service, pid, seconds))
            await asyncio.sleep(seconds - _PROOF_SECONDS)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
