"""Hub and peers over real sockets: delivery, loss that is told, addresses that are refused."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from pagefleet.cell_key import CellKey
from pagefleet.endpoint import EndpointError, check_endpoint
from pagefleet.gate import Gate
from pagefleet.transport import MAX_FRAME_BYTES, MOST_AT_ONCE, Hub, Peer
from tests.processes import may_mount
from tests.unit.shared.gated import FALSE_ANSWERS, HOST, Impostor, wait_for

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_frames_go_both_ways(context: Context, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/deep/hub.sock"
    with ExitStack() as stack:
        hub = stack.enter_context(closing(Hub(endpoint, context)))
        peers = [stack.enter_context(closing(Peer(endpoint, context))) for _ in range(3)]
        for number, peer in enumerate(peers):
            assert wait_for(lambda peer=peer, number=number: peer.send(b"hello %d" % number))
        arrived: list[tuple[bytes, bytes]] = []
        wait_for(lambda: arrived.extend(hub.receive()) or len(arrived) == 3)
        assert sorted(frame for _, frame in arrived) == [b"hello 0", b"hello 1", b"hello 2"]
        for identity, frame in arrived:
            assert hub.send(identity, b"to " + frame)
        for number, peer in enumerate(peers):
            assert wait_for(peer.receive) == [b"to hello %d" % number]


def test_whoever_reads_a_hub_comes_to_other_things_while_peers_never_pause(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Hub(f"ipc://{tmp_path}/hub.sock", context)) as hub, monkeypatch.context() as patch:
        endless = SimpleNamespace(recv_multipart=lambda _: [b"peer", b"frame"])
        patch.setattr(hub, "socket", endless)
        assert len(hub.receive()) == MOST_AT_ONCE


def test_the_lost_are_told_apart(context: Context, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/hub.sock"
    with closing(Peer(endpoint, context)) as peer:
        assert not peer.send(b"nobody listens yet")
        with closing(Hub(endpoint, context)) as hub:
            assert not hub.send(b"unknown", b"frame")
            assert wait_for(lambda: peer.send(b"now"))
            ((identity, _),) = wait_for(hub.receive)  # type: ignore[misc]
            assert hub.send(identity, b"frame")
            peer.close()
            assert wait_for(lambda: not hub.send(identity, b"frame"))


def test_who_comes_back_is_heard_though_the_old_connection_still_stands(
    context: Context, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/hub.sock"
    with ExitStack() as stack:
        hub = stack.enter_context(closing(Hub(endpoint, context)))
        old = stack.enter_context(closing(Peer(endpoint, context)))
        assert wait_for(lambda: old.send(b"old"))
        ((identity, _),) = wait_for(hub.receive)  # type: ignore[misc]
        new = stack.enter_context(closing(context.socket(zmq.DEALER)))
        new.setsockopt(zmq.IDENTITY, identity)
        new.connect(endpoint)
        new.send(b"new")
        assert wait_for(hub.receive) == [(identity, b"new")]
        assert hub.send(identity, b"welcome")
        assert new.poll(60_000)
        assert new.recv() == b"welcome"


@pytest.mark.parametrize("host", ["127.0.0.1", HOST])
def test_whoever_met_somebody_else_at_the_hubs_address_joins_it_later(host: str) -> None:
    """Libzmq connects no more where it was answered what it cannot take."""
    key = CellKey(os.urandom(32)) if host == HOST else None
    impostors = {name: Impostor(host, says) for name, says in FALSE_ANSWERS.items()}
    endpoints = [impostor.endpoint for impostor in impostors.values()]
    with zmq.Context() as context, ExitStack() as stack:
        waiting = {name: Peer(each.endpoint, context, key) for name, each in impostors.items()}
        for name, impostor in impostors.items():
            stack.enter_context(closing(waiting[name]))
            impostor.answer()
        gate = stack.enter_context(closing(Gate(key, context))) if key else None
        hub = stack.enter_context(closing(Hub(endpoints, context, gate)))
        if gate:
            gate.start()
        assert wait_for(lambda: not _join(waiting)), list(waiting)
        assert wait_for(hub.receive)


def _join(waiting: dict[str, Peer]) -> dict[str, Peer]:
    """Take out those that have a connection now."""
    for name in [name for name, peer in waiting.items() if peer.send(b"here")]:
        del waiting[name]
    return waiting


def test_who_was_sent_too_large_a_frame_comes_back(context: Context, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/hub.sock"
    with closing(Hub(endpoint, context)) as hub, closing(Peer(endpoint, context)) as peer:
        assert wait_for(lambda: peer.send(b"here"))
        ((identity, _),) = wait_for(hub.receive)  # type: ignore[misc]
        assert hub.send(identity, bytes(MAX_FRAME_BYTES + 1))
        assert wait_for(lambda: not peer.send(b"still"))
        assert wait_for(lambda: peer.send(b"again"))
        assert wait_for(lambda: (identity, b"again") in hub.receive())
        assert hub.send(identity, b"smaller")
        assert wait_for(peer.receive) == [b"smaller"]


@pytest.mark.parametrize(
    ("endpoint", "sentence"),
    [
        ("tcp://0.0.0.0:5555", "beyond this machine"),
        ("tcp://10.1.2.3:5555", "beyond this machine"),
        ("ipc://" + "x" * 108, "shorter folder"),
        ("ipc://", "shorter folder"),
        ("ipc://@nowhere", "name a path"),
        ("ipc://*", "name a path"),
        ("http://localhost", "begins with ipc"),
        ("inproc://x", "begins with ipc"),
    ],
)
def test_refused_addresses(endpoint: str, sentence: str) -> None:
    with pytest.raises(EndpointError, match=sentence):
        check_endpoint(endpoint)
    if "beyond" not in sentence:  # a key does not make it one
        with pytest.raises(EndpointError, match=sentence):
            check_endpoint(endpoint, CellKey(bytes(32)))


def test_a_taken_address(context: Context) -> None:
    with closing(Hub("tcp://127.0.0.1:*", context)) as first:
        endpoint = first.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        with pytest.raises(EndpointError, match="cannot listen"):
            Hub(endpoint, context)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://127.0.0.1:none"])
def test_an_address_that_is_none(context: Context, address: str) -> None:
    for end in (Hub, Peer):
        with pytest.raises(EndpointError, match=f"^{re.escape(address)}: cannot (listen|connect)"):
            end(address, context)


def test_ipv6(context: Context) -> None:
    with closing(Hub("tcp://[::1]:*", context)) as hub:
        endpoint = hub.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        with closing(Peer(endpoint, context)) as peer:
            assert wait_for(lambda: peer.send(b"hello"))
            assert wait_for(hub.receive)


BY_NAME = """
import os, zmq
from contextlib import closing
from pagefleet.cell_key import CellKey
from pagefleet.gate import Gate
from pagefleet.transport import Hub, Peer
from tests.unit.shared.gated import wait_for

key = CellKey(bytes(32))
with zmq.Context() as context, closing(Gate(key, context)) as gate:
    with closing(Hub("tcp://[::1]:*", context, gate)) as hub:
        gate.start()
        port = hub.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\\0").decode().rpartition(":")[2]
        with closing(Peer(f"tcp://scheduler:{port}", context, key)) as peer:
            assert wait_for(lambda: peer.send(b"hello"))
            assert wait_for(hub.receive)
"""


@pytest.mark.skipif(not may_mount(), reason="a process may mount nothing here")
def test_a_name_of_ipv6_alone(tmp_path: Path) -> None:
    hosts, script = tmp_path / "hosts", tmp_path / "by_name.py"
    hosts.write_text("::1 scheduler\n")
    script.write_text(BY_NAME)
    named = f"mount --bind {hosts} /etc/hosts && exec {sys.executable} {script}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(["unshare", "--mount", "sh", "-c", named], env=environment, check=True)
