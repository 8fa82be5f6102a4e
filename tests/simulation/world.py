"""A virtual clock, the processes that live by it, and the story of what happened.

Nothing here looks at a wall clock, at the order of hashes or at addresses of objects: a seed gives
the same story each time.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

from pagefleet.wire import Message


@dataclass(frozen=True, slots=True)
class Incident:
    """One line of the story."""

    time: float
    who: str
    what: str
    message: Message | None = None

    def __str__(self) -> str:
        text = f"{self.time:9.4f} {self.who:12} {self.what}"
        return text if self.message is None else f"{text} {describe(self.message)}"


class World:
    """Virtual time: what is to happen, in order."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(f"world {seed}")
        self.story: list[Incident] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Let something happen; at equal times, in the order in which it was asked for."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, action))

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Let time pass until something holds; whether it does before `limit`."""
        while not until():
            if not self._events or self._events[0][0] > limit:
                return False
            self.now, _, action = heapq.heappop(self._events)
            action()
        return True

    def tell(self, who: str, what: str, message: Message | None = None) -> None:
        """Add to the story."""
        self.story.append(Incident(self.now, who, what, message))


class Process:
    """Something that runs, may be stopped and go on (SIGSTOP, SIGCONT), and dies once."""

    def __init__(self, world: World, name: str, incarnation: int = 0) -> None:
        self.world = world
        self.name = name
        self.address = f"{name}.{incarnation}".encode()
        self.died = inf
        self.missed_from = inf
        """When others notice that it died, if they send to it."""
        self.mute_after = inf
        """What it sent later was lost with it."""
        self.connected_from = 0.0
        """When it can send and be sent to."""
        self.stopped = False
        self._held: list[Callable[[], None]] = []

    @property
    def alive(self) -> bool:
        """Whether it has not died."""
        return self.died == inf

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Let it do something; not if it is dead by then, and later if it is stopped."""
        self.world.after(seconds, partial(self._do, action))

    def receive(self, sender: bytes, message: Message) -> None:
        """Take a message in."""
        raise NotImplementedError

    def die(self) -> None:
        """Be gone at once, and some of what was sent last with it."""
        self.died = self.world.now
        self.missed_from = self.died + self.world.random.choice([0.0, 0.5, inf])
        self.mute_after = self.died - self.world.random.uniform(0, 0.002)
        self.world.tell(self.name, "dies")

    def stop(self) -> None:
        """Do nothing any more; what comes in queues up."""
        self.stopped = True
        self.world.tell(self.name, "is stopped")

    def resume(self) -> None:
        """Go on with all that has queued up."""
        self.stopped = False
        if self.alive:
            self.world.tell(self.name, f"goes on with {len(self._held)} things to do")
        while self._held and self.alive and not self.stopped:
            self._held.pop(0)()

    def _do(self, action: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._held.append(action)
        else:
            action()


def describe(message: Message) -> str:
    """A message in one line, with numbers of bytes in place of packed numbers."""
    fields = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if value in (None, b"", [], {}) or name == "params":
            continue
        fields.append(f"{name}={_short(value)}")
    return f"{type(message).__name__}({', '.join(fields)})"


def _short(value: object) -> str:
    if isinstance(value, bytes):
        return f"<{len(value)}>"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    if hasattr(value, "__struct_fields__"):
        return describe(value)  # type: ignore[arg-type]
    return str(value)
