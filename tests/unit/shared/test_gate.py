"""The gate before TCP: members get in, and nobody else, whatever they know, send or repeat."""

import logging
import os
import random
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import zmq

from pagefleet import gate as gates
from pagefleet.cell_key import CellKey
from pagefleet.endpoint import EndpointError
from pagefleet.gate import HANDSHAKE_MS, public_key
from pagefleet.transport import Hub, Peer
from tests.unit.shared.gated import HOST, RUBBISH, Cell, Relay, wait_for

REFUSED = "does not let this process in"


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
        assert wait_for(lambda: REFUSED in stranger.silence("--there"))
        assert not wait_for(lambda: stranger.send(b"hello"), 0.3)


def test_nothing_beyond_the_machine_is_without_a_key(cell: Cell) -> None:
    for end in (Hub, Peer):
        with pytest.raises(EndpointError, match=r"refused without a key.*--cell-key"):
            end(cell.endpoint, cell.context)


def test_an_order_in_which_addresses_are_named_opens_none(cell: Cell, tmp_path: Path) -> None:
    order = [f"tcp://{HOST}:*", f"ipc://{tmp_path}/second", f"tcp://{HOST}:*"]
    with closing(Hub(order, cell.context, cell.gate)) as hub:
        endpoint = hub.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        stranger, member = cell.stranger(), cell.peer(cell.key, endpoint)
        cell.insist(stranger, endpoint)
        assert wait_for(lambda: member.send(b"member"))
        assert wait_for(lambda: [frame for _, frame in hub.receive()]) == [b"member"]
        assert not hub.socket.poll(100)


@pytest.mark.parametrize("knows", ["nothing", "another cell", "the hub's key", "public keys"])
def test_who_lacks_the_key_is_refused(
    cell: Cell, knows: str, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = cell.stranger()
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
    cell.insist(stranger, cell.endpoint, times=1)
    assert cell.answers(cell.peer(cell.key))
    assert wait_for(lambda: re.search(r"refused \d+ connections", caplog.text))
    cell.insist(stranger, cell.endpoint)
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
            assert wait_for(lambda member=member: REFUSED in member.silence("--there"))
            assert not wait_for(lambda member=member: member.send(b"secret"), 0.3)
            assert not false.poll(50)


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
    monkeypatch.setattr(gates, "QUIET_SECONDS", quiet := 0.5)
    began = time.monotonic()

    def knock(count: int) -> None:
        for _ in range(count):
            with socket.create_connection((HOST, cell.port)) as stranger, suppress(ConnectionError):
                stranger.sendall(RUBBISH["null"])
                stranger.recv(1000)

    def told() -> list[int]:
        return [int(count) for count in re.findall(r"refused (\d+) connections", caplog.text)]

    with caplog.at_level(logging.WARNING, "pagefleet.gate"):
        knock(1)
        assert wait_for(lambda: told() == [1])
        knock(7)
        assert wait_for(lambda: sum(told()) == 8)
    assert 2 <= len(told()) <= 1 + (time.monotonic() - began) / quiet


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
    began = time.monotonic()
    with closing(Relay(cell.port)) as relay:
        member = cell.peer(cell.key, relay.endpoint)
        assert cell.answers(member)
        member.close()
    heard = len(cell.hear())
    # What is heard before that byte: a frame, or several in the place of recorded heartbeats, of
    # which there are two in 0.3 s, each shorter than two frames.
    most = 1 + 4 * (time.monotonic() - began) / 0.3
    frame_at = len(relay.sent) - random.randrange(1, 20)
    print("byte", frame_at, "of", len(relay.sent))
    with closing(Relay(cell.port, frame_at)) as relay:
        member = cell.peer(cell.key, relay.endpoint)
        assert wait_for(lambda: member.send(b"8 bytes."))
        assert wait_for(lambda: not member.send(b"8 bytes."))
    assert len(cell.hear()) <= heard + most
    assert set(cell.heard[heard:]) <= {b"8 bytes."}
