"""Strangers at the scheduler's sockets that speak ZeroMQ, but not what we speak."""

import contextlib
import os
import random

import msgpack
import pytest
import zmq

from pagefleet.host import host_id, start_time
from pagefleet.wire import PROTOCOL, GatewayHello, WorkerHello, encode, sealed
from tests.faults.cell import wait_until
from tests.faults.conftest import Load, assert_exact
from tests.faults.proxy import unpack


@contextlib.contextmanager
def stranger(cell, side):
    """A DEALER at one of the scheduler's sockets."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(f"ipc://{cell.folder}/{side}-hub")
        yield dealer


def worker_hello(protocol=PROTOCOL, fingerprint="another model"):
    pid = os.getpid()
    return WorkerHello(
        protocol, host_id(), pid, start_time(pid), fingerprint, "echo", 16, 64, 8, 512, 64, 260
    )


@pytest.mark.parametrize(
    ("side", "hello", "reason"),
    [
        ("gateways", GatewayHello(PROTOCOL + 1), "protocol"),
        ("workers", worker_hello(protocol=PROTOCOL + 1), "protocol"),
        ("workers", worker_hello(), "another model"),
        ("gateways", GatewayHello(PROTOCOL, "another model"), "another model"),
    ],
)
def test_who_does_not_fit_is_refused_with_a_reason(cell, questions, side, hello, reason):
    said = cell.scheduler.said("refused a process")
    with stranger(cell, side) as dealer:
        for _ in range(3):
            dealer.send(encode(hello))
            assert dealer.poll(30_000)
            tag, text = unpack(dealer.recv())
            assert tag == "Refused"
            assert reason in text
    wait_until(lambda: cell.scheduler.said("refused a process") > said)
    assert_exact(Load(questions).run(cell))
    assert cell.scheduler.said("refused a process") == said + 1


@pytest.mark.parametrize("side", ["gateways", "workers"])
def test_nonsense_in_frames_is_dropped(cell, questions, side):
    """Random bytes, random msgpack, and real messages of the wrong side or with a byte changed."""
    dropped, sent = cell.scheduler.said("dropped a frame"), 200
    hello = encode(worker_hello() if side == "workers" else GatewayHello(PROTOCOL))
    with stranger(cell, side) as dealer:
        for number in range(sent):
            if number % 3 == 0:
                frame = random.randbytes(random.randint(0, 500))
            elif number % 3 == 1:
                frame = sealed(msgpack.packb([random.choice(["Plan", "Result", 7, None])] * 9))
            else:
                frame = bytearray(hello)
                frame[random.randrange(len(frame))] ^= random.randrange(1, 256)
            dealer.send(bytes(frame))
    scheduler = cell.scheduler.pid
    assert_exact(Load(questions).run(cell))
    assert cell.scheduler.pid == scheduler
    assert cell.scheduler.alive
    assert cell.scheduler.said("dropped a frame") > dropped
