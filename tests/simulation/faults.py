"""Faults: what may happen to a simulated cell, when, and for how long."""

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from tests.simulation.network import Mangling, Moment, Partition, Severity

if TYPE_CHECKING:
    from tests.simulation.cell import Cell

HEARTBEAT_TIMEOUT = 0.9
"""Seconds after which ZeroMQ gives a silent connection up (`transport`)."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something goes wrong."""

    when: float | Moment

    def strike(self, cell: "Cell") -> None:
        """Let it happen now; `cell.holds` until it is over."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Kill(Fault):
    """SIGKILL; another process takes the place after a while."""

    target: str
    down: float
    watched: bool = True
    """The scheduler learns of a worker's death from the kernel."""

    def strike(self, cell: "Cell") -> None:
        process = cell.running.get(self.target)
        if process is None:
            return
        cell.die(process)
        if self.watched and process.name.startswith("worker"):
            cell.world.after(0.002, partial(cell.report_death, process.address))
        cell.start_later(self.target, self.down)


@dataclass(frozen=True, slots=True)
class Terminate(Fault):
    """SIGTERM: a worker or a gateway says goodbye; another takes its place."""

    target: str
    down: float

    def strike(self, cell: "Cell") -> None:
        process = cell.running.get(self.target)
        if process is not None:
            cell.terminate(process)
            cell.start_later(self.target, self.down)


@dataclass(frozen=True, slots=True)
class Stop(Fault):
    """SIGSTOP, then SIGCONT. ZeroMQ gives up the connection of one that is stopped for long."""

    target: str
    seconds: float

    def strike(self, cell: "Cell") -> None:
        process = cell.running.get(self.target)
        if process is None or process.stopped:
            return
        process.stop()
        cell.hold(self.seconds)
        cell.world.after(self.seconds, partial(cell.resume, process))
        if self.seconds > HEARTBEAT_TIMEOUT:
            cell.world.after(HEARTBEAT_TIMEOUT, partial(cell.disconnect, process))


@dataclass(frozen=True, slots=True)
class Stick(Fault):
    """A worker's compute thread makes no progress, while its I/O lives."""

    target: str
    seconds: float

    def strike(self, cell: "Cell") -> None:
        if (process := cell.running.get(self.target)) is not None:
            cell.world.tell(self.target, f"computes nothing for {self.seconds:.2f} s")
            process.stuck_until = cell.world.now + self.seconds  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Fail(Fault):
    """A worker's next steps raise an exception."""

    target: str
    how: Literal["step", "row", "lie"] = "step"

    def strike(self, cell: "Cell") -> None:
        if (process := cell.running.get(self.target)) is not None:
            process.failures.append(self.how)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Interrupt(Fault):
    """A peer's connection is interrupted, in one direction or both."""

    target: str
    seconds: float
    inward: bool
    outward: bool
    mode: Severity

    def strike(self, cell: "Cell") -> None:
        directions = [False] * self.inward + [True] * self.outward
        cell.world.tell("network", f"{self.mode}s what {self.target} {directions} says")
        until = cell.world.now + self.seconds
        cell.hold(self.seconds)
        cell.network.partitions += [
            Partition(self.target, outward, until, self.mode) for outward in directions
        ]


@dataclass(frozen=True, slots=True)
class Mangle(Fault):
    """Messages are dropped, repeated, delayed (overtaken by later ones) or cut off."""

    mangling: Mangling
    seconds: float

    def strike(self, cell: "Cell") -> None:
        until = cell.world.now + self.seconds
        cell.hold(self.seconds + self.mangling.seconds)
        cell.network.manglings.append(replace(self.mangling, until=until))


@dataclass(frozen=True, slots=True)
class Leave(Fault):
    """A client leaves, or a stop string has ended one of its choices."""

    request: str
    choice: int | None

    def strike(self, cell: "Cell") -> None:
        cell.leave(self.request, self.choice)


@dataclass(frozen=True, slots=True)
class Reconnect(Fault):
    """A client's connection breaks, which its gateway may not see, and it goes on at another."""

    request: str
    closes: bool

    def strike(self, cell: "Cell") -> None:
        cell.reconnect(self.request, self.closes)
