"""A proxy between services that understands ZMTP 3.1 (rfc.zeromq.org/spec/23) and our messages.

    peer (DEALER) --Unix socket--> proxy --Unix socket--> hub (ROUTER)

It passes the greeting, the handshake and the heartbeats on as they are, and lets rules act on the
messages, each of which is one frame that begins with msgpack whose first element is its name. It
runs an event loop in a thread of its own, so that tests may block. A rule counts how often it
fired; a test asserts that.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

import msgpack

GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_STALL_SECONDS = 0.01


class Action(Enum):
    """What happens to a message."""

    PASS = auto()
    """Nothing; for rules that call something."""
    DROP = auto()
    REPEAT = auto()
    REORDER = auto()
    """It changes places with the message that follows it."""
    DELAY = auto()
    """Others overtake it."""
    TRUNCATE = auto()
    """Its end is missing."""
    CORRUPT = auto()
    """One of its bytes is another."""
    CUT = auto()
    """The connection breaks in the middle of it."""


@dataclass
class Rule:
    """What happens to messages named `tag` (to all, if that is None)."""

    tag: str | None
    action: Action
    first: int = 1
    """The first message that it fires at, counted over all connections."""
    times: int = 1
    """How many messages in a row."""
    share: float | None = None
    """Instead: fires at each with this probability."""
    seconds: float = 0.0
    """Of a delay."""
    holds: Callable[[bytes], bool] = lambda frame: True
    """It is about messages for which this is true."""
    call: Callable[["Link"], None] = lambda link: None
    """Called when it fires."""
    seen: int = 0
    fired: int = 0

    def fires(self, tag: str, frame: bytes, draw: random.Random) -> bool:
        """Count a message; whether something happens to it."""
        if self.tag not in (None, tag) or not self.holds(frame):
            return False
        self.seen += 1
        if self.share is not None:
            fires = draw.random() < self.share
        else:
            fires = self.first <= self.seen < self.first + self.times
        self.fired += fires
        return fires


@dataclass(eq=False)
class Link:
    """One connection of a peer, with that of the proxy to the hub."""

    pid: int | None = None
    """Of the peer, once it has said so."""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def close(self) -> None:
        """End both connections."""
        for writer in self.writers:
            writer.close()


class Cut(Exception):
    """A connection is to break."""


class Proxy:
    """Listens at `front`, connects to `back`; both are paths of Unix sockets."""

    def __init__(self, front: Path, back: Path, seed: int) -> None:
        self.front, self.back = front, back
        self.counts: dict[str, int] = {}
        """Messages that came in, by name."""
        self.rules: list[Rule] = []
        self.links: list[Link] = []
        self.held = 0
        """Frames that a stall kept back."""
        self._stalled: set[str] = set()
        self._draw = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"proxy {front.name}")
        self._listening = threading.Event()
        self._over: asyncio.Event | None = None
        self._later: set[asyncio.Task] = set()

    def __enter__(self) -> "Proxy":
        self._thread.start()
        assert self._listening.wait(10)
        return self

    def __exit__(self, *exception) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def act(self, tag, action, **how) -> Rule:
        """Add a rule."""
        rule = Rule(tag, action, **how)
        self.rules = [*self.rules, rule]
        return rule

    def forgive(self) -> None:
        """Drop all rules."""
        self.rules = []

    @contextlib.contextmanager
    def stalled(self, *directions):
        """Nothing arrives "up" at the hub or "down" at its peers; it is kept, as by TCP."""
        self._stalled = set(directions)
        try:
            yield
        finally:
            self._stalled = set()

    def cut_all(self) -> int:
        """Break every connection; how many there were."""
        links = list(self.links)
        for link in links:
            self._loop.call_soon_threadsafe(link.close)
        return len(links)

    # --- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        server = await asyncio.start_unix_server(self._connected, self.front)
        self._listening.set()
        await self._over.wait()
        server.close()
        for link in list(self.links):
            link.close()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=5)

    async def _connected(self, reader, writer) -> None:
        try:
            back_reader, back_writer = await asyncio.open_unix_connection(self.back)
        except OSError:
            writer.close()
            return
        link = Link(writers=[writer, back_writer])
        self.links.append(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(link, reader, back_writer, "up"))
                group.create_task(self._pump(link, back_reader, writer, "down"))
        except* (Cut, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            link.close()
            self.links.remove(link)

    async def _pump(self, link, reader, writer, direction) -> None:
        await pass_greeting(reader, writer)
        held: bytes | None = None
        while True:
            flags, frame = await read_frame(reader)
            self.held += direction in self._stalled
            while direction in self._stalled:
                await asyncio.sleep(_STALL_SECONDS)
            if flags & _COMMAND:
                writer.write(encode_frame(flags, frame))
                continue
            sent, hold = self._treat(link, writer, frame)
            if hold:
                held, sent = (frame, held) if held is None else (held, frame)
            elif held is not None and sent is not None:
                sent, held = [*sent, held], None
            for each in sent or ():
                writer.write(encode_frame(flags, each))
            await writer.drain()

    def _treat(self, link, writer, frame) -> tuple[list[bytes] | None, bool]:
        """What is sent in place of a message, and whether it is held until the next has passed."""
        tag = tag_of(frame)
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag == "WorkerHello":
            link.pid = unpack(frame)[3]
        rule = next((rule for rule in self.rules if rule.fires(tag, frame, self._draw)), None)
        if rule is None:
            return [frame], False
        rule.call(link)
        match rule.action:
            case Action.DROP:
                return [], False
            case Action.REPEAT:
                return [frame, frame], False
            case Action.REORDER:
                return None, True
            case Action.DELAY:
                task = asyncio.create_task(self._send_later(writer, frame, rule.seconds))
                self._later.add(task)
                task.add_done_callback(self._later.discard)
                return [], False
            case Action.TRUNCATE:
                return [frame[: self._draw.randrange(len(frame))]], False
            case Action.CORRUPT:
                at = self._draw.randrange(len(frame))
                wrong = frame[at] ^ self._draw.randrange(1, 256)
                return [frame[:at] + bytes([wrong]) + frame[at + 1 :]], False
            case Action.CUT:
                writer.write(encode_frame(0, frame)[: 1 + len(frame) // 2])
                raise Cut
        return [frame], False

    async def _send_later(self, writer, frame, seconds) -> None:
        await asyncio.sleep(seconds)
        if not writer.is_closing():
            writer.write(encode_frame(0, frame))


async def pass_greeting(reader, writer) -> None:
    """Pass it on in parts: a peer says the rest when it knows the other's version."""
    left = GREETING_BYTES
    while left:
        part = await reader.read(left)
        if not part:
            raise Cut
        left -= len(part)
        writer.write(part)


async def read_frame(reader) -> tuple[int, bytes]:
    """The flags and the content of the next frame, whatever it is."""
    flags = (await reader.readexactly(1))[0]
    assert not flags & _MORE or flags & _COMMAND, "a message of ours is one frame"
    size = int.from_bytes(await reader.readexactly(8 if flags & _LONG else 1), "big")
    return flags, await reader.readexactly(size)


def encode_frame(flags: int, content: bytes) -> bytes:
    """A frame on the wire."""
    long = len(content) > 255
    flags = flags | _LONG if long else flags & ~_LONG
    return bytes([flags]) + len(content).to_bytes(8 if long else 1, "big") + content


def unpack(frame: bytes) -> list:
    """The name of a message, and its fields."""
    return msgpack.unpackb(frame[:-4])


def tag_of(frame: bytes) -> str:
    """The name of a message."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(frame)
    unpacker.read_array_header()
    return unpacker.unpack()
