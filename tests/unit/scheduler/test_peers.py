"""Peers without number come and go; the scheduler's shell remembers those that it heard last."""

import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from pagefleet.settings import SchedulerSettings
from pagefleet.transport import Hub, Peer
from pagefleet.wire import PROTOCOL, GatewayHello, encode
from pagefleet_scheduler import peers
from pagefleet_scheduler.peers import Peers
from pagefleet_scheduler.server import Server


def test_those_heard_last_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MOST", 3)
    known = Peers()
    with zmq.Context() as context, closing(Hub(f"ipc://{tmp_path}/hub", context)) as hub:
        for number in range(100):
            known.hear(b"one that stays", hub)
            known.hear(b"one that left %d" % number, hub)
            assert len(known) <= 3
        assert known.hub_of(b"one that stays") is hub
        assert known.hub_of(b"one that left 0") is None
        assert not known.forget(b"one that left 0")
        known.refuse(b"one that left 0")
        assert not known.is_refused(b"one that left 0")


def test_who_is_refused_is_not_remembered_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "MOST", 5)
    ends = {side: f"ipc://{tmp_path}/{side}" for side in ("gateway_endpoint", "worker_endpoint")}
    server = Server(SchedulerSettings(**ends))
    with zmq.Context() as context, ExitStack() as stack:
        for number in range(20):
            peer = Peer(ends["gateway_endpoint"], context)
            stack.callback(peer.close)
            for _ in range(2):
                ask(peer, server)
            assert caplog.text.count("refused a process") == number + 1
        assert len(server.peers) == 5
    server.close()


def ask(peer: Peer, server: Server) -> None:
    """Ask to join in another protocol, until there is an answer."""
    while not peer.send(encode(GatewayHello(PROTOCOL + 1))):
        time.sleep(0.001)
    while not peer.receive():
        server.turn()
