"""The simulated network between the scheduler and its peers.

Without faults a connection delays messages and keeps their order, as ZeroMQ over one socket does.
A send answers as `transport.Hub` and `transport.Peer` answer: False where there is no connection.
What is sent is encoded and decoded as on the wire.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pagefleet.wire import (
    Message,
    WireError,
    decode_from_gateway,
    decode_from_worker,
    decode_to_gateway,
    decode_to_worker,
    encode,
)
from tests.simulation.world import Process, World

SCHEDULER = "scheduler"

Place = Literal["sent", "arrived"]
Severity = Literal["lose", "hold", "refuse", "slow"]
Manner = Literal["drop", "repeat", "delay", "cut", "corrupt"]


SLOW_RATE = 125_000
"""Bytes a second of a link of 1 Mbit."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When the nth message of a kind has been sent, or has arrived; counted over all peers."""

    kind: str
    nth: int
    place: Place = "arrived"

    def __str__(self) -> str:
        return f"{self.kind} {self.nth} {self.place}"


@dataclass(slots=True)
class Partition:
    """One direction of one peer's connection is interrupted."""

    peer: str
    outward: bool
    """From the peer to the scheduler."""
    until: float
    mode: Severity
    """Messages are lost, or arrive when it ends, or find no connection, or pass at `SLOW_RATE`."""


@dataclass(slots=True)
class Mangling:
    """Something is done to messages of one kind (or all), with a chance, a number of times."""

    how: Manner
    kind: str | None
    chance: float
    times: int
    skip: int = 0
    """Messages of the kind that pass before."""
    seconds: float = 0.0
    """That what is delayed, or the repetition, is late."""
    until: float = 0.0
    done: int = 0


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds that a message takes."""

    least: float = 0.0001
    most: float = 0.001


class Network:
    """All connections of the cell."""

    def __init__(self, world: World, latency: Latency) -> None:
        self.world = world
        self.latency = latency
        self.processes: dict[bytes, Process] = {}
        self._scheduler: Process | None = None
        self.partitions: list[Partition] = []
        self.manglings: list[Mangling] = []
        self._watches: dict[Moment, list[Callable[[], None]]] = {}
        self._counts: Counter[tuple[str, Place]] = Counter()
        self._busy_until: dict[tuple[bytes, bytes], float] = {}

    def add(self, process: Process) -> None:
        """A process is there and connects; it takes a moment."""
        self.processes[process.address] = process
        if process.name == SCHEDULER:
            self._scheduler = process
        process.connected_from = self.world.now + self.world.random.uniform(0.001, 0.02)
        if process.name == SCHEDULER:
            for peer in self.processes.values():
                self.reconnect(peer)

    def send(self, sender: Process, message: Message, target: bytes | None = None) -> bool:
        """Put a message on its way, by default to the scheduler; False: there is no connection."""
        receiver = self._scheduler if target is None else self.processes[target]
        peer, outward = (sender, True) if target is None else (receiver, False)
        now = self.world.now
        if receiver is None or now < peer.connected_from or now > receiver.missed_from:
            return False
        partition = self._partition(peer.name, outward)
        if partition is not None and partition.mode == "refuse":
            return False
        if partition is not None and partition.mode == "lose":
            self.world.tell(sender.name, "loses", message)
            return True
        self.world.tell(sender.name, f"-> {receiver.name}:", message)
        delays = self._delays(sender, receiver, message, partition)
        for delay in delays:
            self.world.after(delay, partial(self._arrive, sender, receiver, now, message))
        self._reached(message, "sent")
        return True

    def count(self, kind: str) -> int:
        """How many messages of a kind have been sent."""
        return self._counts[kind, "sent"]

    def watch(self, moment: Moment, action: Callable[[], None]) -> None:
        """Let something happen at a moment."""
        self._watches.setdefault(moment, []).append(action)

    def reconnect(self, process: Process) -> None:
        """A process has a connection again after a moment."""
        process.connected_from = self.world.now + self.world.random.uniform(0.02, 0.5)

    def _partition(self, peer: str, outward: bool) -> Partition | None:
        self.partitions = [each for each in self.partitions if each.until > self.world.now]
        for each in self.partitions:
            if each.peer == peer and each.outward == outward:
                return each
        return None

    def _delays(
        self, sender: Process, receiver: Process, message: Message, partition: Partition | None
    ) -> list[float]:
        """One for each copy that will arrive."""
        now, way = self.world.now, (sender.address, receiver.address)
        begin = partition.until if partition is not None and partition.mode == "hold" else now
        arrival = begin + self.world.random.uniform(self.latency.least, self.latency.most)
        delays = [max(arrival, self._busy_until.get(way, 0.0)) - now]
        if partition is not None and partition.mode == "slow":
            delays[0] += len(encode(message)) / SLOW_RATE
        for mangling in self.manglings:
            if self._applies(mangling, message):
                self.world.tell("network", f"{mangling.how}s", message)
                match mangling.how:
                    case "drop":
                        return []
                    case "cut" | "corrupt":
                        self._damage(sender, receiver, message, mangling.how)
                        return []
                    case "repeat":
                        delays.append(delays[0] + mangling.seconds)
                    case "delay":
                        return [delays[0] + mangling.seconds]
        self._busy_until[way] = now + delays[0]
        return delays

    def _applies(self, mangling: Mangling, message: Message) -> bool:
        if mangling.times == 0 or self.world.now > mangling.until:
            return False
        if mangling.kind is not None and mangling.kind != type(message).__name__:
            return False
        if mangling.skip > 0:
            mangling.skip -= 1
            return False
        if self.world.random.random() >= mangling.chance:
            return False
        mangling.times -= 1
        mangling.done += 1
        return True

    def _damage(self, sender: Process, receiver: Process, message: Message, how: Manner) -> None:
        """A frame without its end, or of which a byte is another, is no message."""
        frame = bytearray(encode(message))
        at = self.world.random.randrange(len(frame))
        if how == "cut":
            del frame[at:]
        else:
            frame[at] ^= self.world.random.randrange(1, 256)
        try:
            _decoder(sender, receiver)(bytes(frame))
        except WireError:
            return
        raise AssertionError(f"a message was taken for one though it was {how} at byte {at}")

    def _arrive(self, sender: Process, receiver: Process, sent: float, message: Message) -> None:
        if sent <= sender.mute_after and receiver.alive:
            decoded = _decoder(sender, receiver)(encode(message))
            receiver.after(0.0, partial(receiver.receive, sender.address, decoded))
            self._reached(message, "arrived")

    def _reached(self, message: Message, place: Place) -> None:
        kind = type(message).__name__
        self._counts[kind, place] += 1
        if self._watches:
            moment = Moment(kind, self._counts[kind, place], place)
            for action in self._watches.pop(moment, ()):
                self.world.after(0.0, action)


def _decoder(sender: Process, receiver: Process) -> Callable[[bytes], Message]:
    peer, outward = (receiver, False) if sender.name == SCHEDULER else (sender, True)
    if peer.name.startswith("gateway"):
        return decode_from_gateway if outward else decode_to_gateway
    return decode_from_worker if outward else decode_to_worker
