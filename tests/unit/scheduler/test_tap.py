"""The tap publishes what passes a hub, whether or not anybody reads."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgpack
import pytest
import zmq

from pagefleet.endpoint import EndpointError
from pagefleet.transport import Peer
from pagefleet_scheduler.tap import Tap, TappedHub


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context


def test_both_directions_are_published(
    tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    where = f"ipc://{tmp_path}/tap"
    with (
        closing(Tap(where, context)) as tap,
        closing(TappedHub(f"ipc://{tmp_path}/hub", context, None, b"worker", tap)) as hub,
        closing(Peer(f"ipc://{tmp_path}/hub", context)) as peer,
        closing(context.socket(zmq.SUB)) as reader,
    ):
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.setsockopt(zmq.RCVTIMEO, 10_000)
        reader.connect(where)
        while not reader.poll(10):
            tap.publish(b"is anybody there?")
        while reader.poll(50):
            reader.recv()
        while not peer.send(b"hello"):
            peer.socket.poll(10, zmq.POLLOUT)
        hub.socket.poll(10_000)
        [(identity, frame)] = hub.receive()
        assert frame == b"hello"
        assert msgpack.unpackb(reader.recv()) == [b">", b"worker", identity, b"hello"]
        assert not reader.getsockopt(zmq.RCVMORE)  # see the module's text
        assert hub.send(identity, b"welcome")
        assert msgpack.unpackb(reader.recv()) == [b"<", b"worker", identity, b"welcome"]


def test_nobody_who_does_not_read_is_waited_for(
    tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    with (
        closing(Tap(f"ipc://{tmp_path}/tap", context)) as tap,
        closing(context.socket(zmq.SUB)) as reader,
    ):
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.connect(f"ipc://{tmp_path}/tap")
        while not reader.poll(10):
            tap.publish(b"is anybody there?")
        for _ in range(20_000):
            tap.publish(b"<", b"worker", b"w", b"x" * 1000)


def test_readers_find_one_whose_file_was_deleted(
    tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    where = tmp_path / "tap"
    with (
        closing(Tap(f"ipc://{where}", context)) as tap,
        closing(context.socket(zmq.SUB)) as reader,
    ):
        where.unlink()
        tap.stay_found(time.monotonic())
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.connect(f"ipc://{where}")
        while not reader.poll(10):
            tap.publish(b"is anybody there?")


@pytest.mark.slow
def test_it_may_be_closed_while_readers_are_in_arrears(
    tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    """With messages of four parts libzmq ended this process, within a few hundred rounds."""
    for number in range(300):
        where = f"ipc://{tmp_path}/tap{number}"
        with ExitStack() as stack:
            tap = stack.enter_context(closing(Tap(where, context)))
            readers = [stack.enter_context(closing(context.socket(zmq.SUB))) for _ in range(20)]
            for reader in readers:
                reader.setsockopt(zmq.LINGER, 0)
                reader.setsockopt(zmq.SUBSCRIBE, b"")
                reader.connect(where)
            while not all(reader.poll(10) for reader in readers):
                tap.publish(b"is anybody there?")
            for _ in range(20_000):
                tap.publish(b"<", b"worker", b"w", b"x" * 1000)


def test_an_address_that_is_none_is_refused(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    for address, sentence in (
        ("nowhere", "begins with ipc"),
        ("tcp://0.0.0.0:5555", "a tap needs no key, so that it is for this machine only"),
        ("ipc:///proc/cell/tap", "cannot be made"),
    ):
        with pytest.raises(EndpointError, match=sentence):
            Tap(address, context)
