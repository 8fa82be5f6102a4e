"""A hub behind its gate, and what strangers at it and on its wires can do."""

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import zmq

from pagefleet.cell_key import CellKey
from pagefleet.gate import Gate
from pagefleet.transport import Hub, Peer

HOST = "127.0.0.2"
"""Of this machine, but no loopback address that is taken without a key."""

Context = zmq.Context[zmq.Socket[bytes]]


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> object:
    """The first true value of a condition, or its last one where none comes in that time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return value


class Cell:
    """A hub behind its gate, at TCP and at a Unix socket, and what it hears."""

    def __init__(self, folder: Path) -> None:
        self.context: Context = zmq.Context()
        self.key = CellKey(os.urandom(32))
        self.gate = Gate(self.key, self.context)
        self.local = f"ipc://{folder}/hub"
        self.hub = Hub([self.local, f"tcp://{HOST}:*"], self.context, self.gate)
        self.endpoint = self.hub.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.port = int(self.endpoint.rpartition(":")[2])
        self.gate.start()
        self.heard: list[bytes] = []
        self._opened = ExitStack()

    def peer(self, key: CellKey | None, endpoint: str = "") -> Peer:
        where = endpoint or self.endpoint
        return self._opened.enter_context(closing(Peer(where, self.context, key)))

    def stranger(self) -> zmq.Socket[bytes]:
        stranger: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        return self._opened.enter_context(closing(stranger))

    def insist(self, stranger: zmq.Socket[bytes], endpoint: str, times: int = 5) -> None:
        """Have a stranger connect, and say something if it can, again and again.

        By itself it would give up a connection that is refused in words.
        """
        for _ in range(times):
            stranger.connect(endpoint)
            with suppress(zmq.Again):
                stranger.send(b"stranger", zmq.DONTWAIT)
            time.sleep(0.05)

    def hear(self) -> list[bytes]:
        """All frames so far."""
        self.heard += [frame for _, frame in self.hub.receive()]
        return self.heard

    def answers(self, peer: Peer) -> bool:
        """Whether a peer is heard, and hears."""
        frame = os.urandom(8)
        if not wait_for(lambda: peer.send(frame)):
            return False
        return bool(wait_for(lambda: frame in self._echo() and frame in peer.receive()))

    def _echo(self) -> list[bytes]:
        for identity, frame in self.hub.receive():
            self.heard.append(frame)
            self.hub.send(identity, frame)
        return self.heard

    def close(self) -> None:
        self._opened.close()
        self.hub.close()
        self.gate.close()
        self.context.term()


GREETING_BYTES = 64


def greeting(version: bytes, mechanism: bytes, as_server: bool = False) -> bytes:
    """The first 64 bytes of ZMTP 3 (rfc.zeromq.org/spec/23)."""
    signature, role = b"\xff" + bytes(8) + b"\x7f", bytes([as_server])
    return (signature + version + mechanism.ljust(20, b"\0") + role).ljust(GREETING_BYTES, b"\0")


RUBBISH = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: cell\r\n\r\n" + b"x" * 100,
    "zmtp 1": b"\x01\x00\x06\x00stranger",
    "zmtp 2": b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\0\0\0\x08stranger",
    "null": greeting(b"\x03\x01", b"NULL") + b"\x04\x06\x05READY\0\x08stranger",
    "plain": greeting(b"\x03\x01", b"PLAIN") + b"\x04\x0c\x05HELLO\x01a\x01b",
    "as a hub": greeting(b"\x03\x01", b"CURVE", True) + b"\x04\x06\x05READY",
    "a message first": greeting(b"\x03\x01", b"CURVE") + b"\0\x08stranger",
    "a huge command": greeting(b"\x03\x01", b"CURVE") + b"\x06\x7f" + b"\xff" * 7,
    "ready at once": greeting(b"\x03\x01", b"CURVE") + b"\x04\x06\x05READY\0\x08stranger",
    "a false hello": greeting(b"\x03\x01", b"CURVE") + b"\x04\xc8\x05HELLO\x01\0" + bytes(192),
}


FALSE_ANSWERS = {
    **RUBBISH,
    "refused in words": greeting(b"\x03\x01", b"CURVE", True) + b"\x04\x0a\x05ERROR\x03400",
    "refused without a key": greeting(b"\x03\x01", b"NULL") + b"\x04\x0a\x05ERROR\x03400",
    "ready at once, as a hub": greeting(b"\x03\x01", b"CURVE", True) + b"\x04\x06\x05READY",
    "no hub": greeting(b"\x03\x01", b"NULL") + b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x03PUB",
}
"""What somebody else may say to a peer at the hub's address."""


class Impostor:
    """Has the address of a hub, and something false to say there."""

    def __init__(self, host: str, says: bytes) -> None:
        self._listener = socket.create_server((host, 0))
        self._says = says
        self.endpoint = f"tcp://{host}:{self._listener.getsockname()[1]}"

    def answer(self) -> None:
        """Wait for one who connects, answer, and wait until it leaves or says no more; then go."""
        with self._listener, self._listener.accept()[0] as peer, suppress(OSError):
            peer.settimeout(0.2)
            peer.sendall(self._says)
            while peer.recv(65536):
                pass


class Relay:
    """A wire between a peer and a hub, with somebody on it: hears all, and may change a byte.

    `spoil`: which byte that the peer sends arrives as another.
    """

    def __init__(self, port: int, spoil: int | None = None) -> None:
        self.sent = b""
        """All that the peer has sent over its first connection."""
        self._spoil, self._port = spoil, port
        self._listener = socket.create_server((HOST, 0))
        self.endpoint = f"tcp://{HOST}:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with suppress(OSError):
            peer, _ = self._listener.accept()
            hub = socket.create_connection((HOST, self._port))
            self._listener.close()
            for source, target, keep in ((peer, hub, True), (hub, peer, False)):
                passing = threading.Thread(target=self._pass, args=(source, target, keep))
                self._threads.append(passing)
                passing.start()

    def _pass(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        with target, suppress(OSError):
            while data := source.recv(65536):
                if keep:
                    start = len(self.sent)
                    self.sent += data
                    if self._spoil is not None and start <= self._spoil < len(self.sent):
                        changed = bytearray(data)
                        changed[self._spoil - start] ^= 1 << random.randrange(8)
                        data = bytes(changed)
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for thread in self._threads:
            thread.join()
