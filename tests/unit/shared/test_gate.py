"""The gate before TCP: members get in, and nobody else, whatever they know, send or repeat."""

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import zmq

from pagefleet import gate as gates
from pagefleet.cell_key import CellKey
from pagefleet.gate import HANDSHAKE_MS, Gate, public_key
from pagefleet.transport import EndpointError, Hub, Peer

HOST = "127.0.0.2"
"""Of this machine, but no loopback address that is taken without a key."""

Context = zmq.Context[zmq.Socket[bytes]]


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> object:
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

    def hear(self) -> list[bytes]:
        """All frames so far."""
        self.heard += [frame for _, frame in self.hub.receive()]
        return self.heard

    def answers(self, peer: Peer, seconds: float = 10.0) -> bool:
        """Whether a peer is heard, and hears."""
        frame = os.urandom(8)
        if not wait_for(lambda: peer.send(frame), seconds):
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


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    with closing(Cell(tmp_path)) as cell:
        yield cell


def test_members_are_heard_from_other_machines_and_from_this_one(cell: Cell) -> None:
    far, near = cell.peer(cell.key), cell.peer(None, cell.local)
    assert cell.answers(far)
    assert cell.answers(near)
    assert cell.answers(far)


def test_with_a_key_no_address_of_tcp_is_without_the_gate(cell: Cell) -> None:
    with closing(Hub("tcp://127.0.0.1:*", cell.context, cell.gate)) as hub:
        endpoint = hub.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        stranger = cell.peer(None, endpoint)
        assert not wait_for(lambda: stranger.send(b"hello"), 0.3)
        assert "does not let this process in" in stranger.silence("--there")


def test_nothing_beyond_the_machine_is_without_a_key(cell: Cell) -> None:
    for end in (Hub, Peer):
        with pytest.raises(EndpointError, match=r"refused without a key.*--cell-key"):
            end(cell.endpoint, cell.context)


def test_an_order_in_which_addresses_are_named_opens_none(cell: Cell, tmp_path: Path) -> None:
    order = [f"tcp://{HOST}:*", f"ipc://{tmp_path}/second", f"tcp://{HOST}:*"]
    with closing(Hub(order, cell.context, cell.gate)) as hub:
        endpoint = hub.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        stranger, member = cell.stranger(), cell.peer(cell.key, endpoint)
        stranger.connect(endpoint)
        stranger.send(b"stranger")
        assert wait_for(lambda: member.send(b"member"))
        assert wait_for(lambda: [frame for _, frame in hub.receive()]) == [b"member"]
        assert not hub.socket.poll(100)


@pytest.mark.parametrize("knows", ["nothing", "another cell", "the hub's key", "public keys"])
def test_who_lacks_the_key_is_refused(
    cell: Cell, knows: str, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = cell.stranger()
    stranger.setsockopt(zmq.RECONNECT_IVL, 20)
    own = os.urandom(32)
    hub = CellKey(os.urandom(32)).hub if knows == "another cell" else cell.key.hub
    if knows == "public keys":  # of the hub and of the peers
        stranger.setsockopt(zmq.CURVE_SECRETKEY, zmq.utils.z85.encode(own))
        stranger.setsockopt(zmq.CURVE_PUBLICKEY, public_key(cell.key.peer))
        stranger.setsockopt(zmq.CURVE_SERVERKEY, public_key(hub))
    elif knows != "nothing":
        stranger.setsockopt(zmq.CURVE_SECRETKEY, zmq.utils.z85.encode(own))
        stranger.setsockopt(zmq.CURVE_PUBLICKEY, public_key(own))
        stranger.setsockopt(zmq.CURVE_SERVERKEY, public_key(hub))
    stranger.connect(cell.endpoint)
    stranger.send(b"stranger")
    assert cell.answers(cell.peer(cell.key))
    assert wait_for(lambda: "refused 1 connections" in caplog.text)
    time.sleep(0.3)  # in which it tries again, many times
    assert caplog.text.count("refused") == 1
    assert b"stranger" not in cell.hear()


def test_who_is_refused_can_say_so_and_who_finds_nobody_too(cell: Cell) -> None:
    other = cell.peer(CellKey(os.urandom(32)))
    assert wait_for(lambda: "by --cell-key a copy" in other.silence("--there"))
    assert not other.send(b"hello")
    cell.hub.close()
    nobody = f"no scheduler answers at {cell.endpoint}; if there is one elsewhere, name it by --x"
    assert wait_for(lambda: other.silence("--x") == nobody)


def test_a_member_says_nothing_to_a_hub_of_somebody_else(cell: Cell) -> None:
    """Nor to one that knows the peers' public key, and listens in the hub's place."""
    for secure in (False, True):
        false = cell.context.socket(zmq.ROUTER)
        with closing(false):
            if secure:
                false.setsockopt(zmq.CURVE_SERVER, 1)
                false.setsockopt(zmq.CURVE_SECRETKEY, zmq.utils.z85.encode(os.urandom(32)))
            port = false.bind_to_random_port(f"tcp://{HOST}")
            member = cell.peer(cell.key, f"tcp://{HOST}:{port}")
            assert not wait_for(lambda member=member: member.send(b"secret"), 0.3)
            assert not false.poll(50)
            assert "does not let this process in" in member.silence("--there")


def greeting(version: bytes, mechanism: bytes, as_server: bool = False) -> bytes:
    """The first 64 bytes of ZMTP 3 (rfc.zeromq.org/spec/23)."""
    signature = b"\xff" + bytes(8) + b"\x7f"
    return (signature + version + mechanism.ljust(20, b"\0") + bytes([as_server])).ljust(64, b"\0")


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


@pytest.mark.parametrize("name", [*RUBBISH, "random"])
def test_rubbish_is_not_heard_and_disturbs_nobody(cell: Cell, name: str) -> None:
    member = cell.peer(cell.key)
    assert cell.answers(member)
    sent = RUBBISH.get(name, os.urandom(random.randrange(1, 1000)))
    for cut in {len(sent), *(random.randrange(len(sent) + 1) for _ in range(5))}:
        with socket.create_connection((HOST, cell.port)) as stranger, suppress(ConnectionError):
            stranger.sendall(sent[:cut])
            assert cell.answers(member), sent[:cut]
    assert all(len(frame) == 8 and frame != b"stranger" for frame in cell.hear())


@pytest.mark.slow
def test_who_says_nothing_is_put_out(cell: Cell) -> None:
    with socket.create_connection((HOST, cell.port)) as silent:
        silent.settimeout(HANDSHAKE_MS / 1e3 + 5)
        while silent.recv(100):
            pass


def test_a_crowd_of_strangers_keeps_no_member_out(
    cell: Cell, caplog: pytest.LogCaptureFixture
) -> None:
    """As many as libzmq would stop at, were nobody to hear what became of them."""
    member = cell.peer(cell.key)
    assert cell.answers(member)
    for _ in range(2500):
        with socket.create_connection((HOST, cell.port)) as stranger:
            stranger.sendall(RUBBISH["a false hello"])
    assert cell.answers(member)
    assert cell.answers(cell.peer(cell.key))
    assert 1 <= caplog.text.count("refused") <= 2


def test_refusals_are_told_once_in_a_while(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gates, "QUIET_SECONDS", 0.5)

    def knock(count: int) -> None:
        for _ in range(count):
            with socket.create_connection((HOST, cell.port)) as stranger, suppress(ConnectionError):
                stranger.sendall(RUBBISH["null"])
                stranger.recv(1000)

    with caplog.at_level(logging.WARNING, "pagefleet.gate"):
        knock(1)
        assert wait_for(lambda: "refused 1 " in caplog.text)
        knock(7)
        assert wait_for(lambda: "refused 7 connections" in caplog.text)
    assert len(caplog.records) == 2


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


def test_a_connection_that_is_played_again_is_not_heard(cell: Cell) -> None:
    with closing(Relay(cell.port)) as relay:
        member = cell.peer(cell.key, relay.endpoint)
        assert cell.answers(member)
        assert cell.answers(member)
        member.close()
    heard = len(cell.hear())
    assert heard == 2
    assert relay.sent
    for pieces in (1, 7):  # at once, and so that the hub can answer in between
        with socket.create_connection((HOST, cell.port)) as again, suppress(ConnectionError):
            size = -(-len(relay.sent) // pieces)
            for start in range(0, len(relay.sent), size):
                again.sendall(relay.sent[start : start + size])
                time.sleep(0.02)
    assert cell.answers(cell.peer(cell.key))
    assert len(cell.hear()) == heard + 1


def test_a_byte_that_was_changed_on_its_way_ends_the_connection(cell: Cell) -> None:
    with closing(Relay(cell.port)) as relay:
        member = cell.peer(cell.key, relay.endpoint)
        assert cell.answers(member)
        member.close()
    heard = len(cell.hear())
    frame_at = len(relay.sent) - random.randrange(1, 20)
    print("byte", frame_at, "of", len(relay.sent))
    with closing(Relay(cell.port, frame_at)) as relay:
        member = cell.peer(cell.key, relay.endpoint)
        assert wait_for(lambda: member.send(b"8 bytes."))
        assert wait_for(lambda: not member.send(b"8 bytes."))
    assert len(cell.hear()) <= heard + 1
    assert set(cell.heard[heard:]) <= {b"8 bytes."}
