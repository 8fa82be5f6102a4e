"""`python -m pagefleet_worker.follower FD SIGNS RENDEZVOUS RANK FLAGS`: a rank beside rank 0.

It does what it is told until its connection closes, and ends with the first step that fails.
"""

import gc
import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from pagefleet.command_line import parse, refuse
from pagefleet.manifest import ManifestError
from pagefleet.observe import configure_logging
from pagefleet.settings import WorkerSettings
from pagefleet_worker.ending import run_to_end
from pagefleet_worker.group import SIGN_SECONDS, Order, meet
from pagefleet_worker.interface import PlanError
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model.shares import Share
from pagefleet_worker.step.engine import TorchEngine
from pagefleet_worker.step.pending import Pending


def main() -> None:
    """Load a share of the model, then follow."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when it is over
    fd, signs, rendezvous, rank, *arguments = sys.argv[1:]
    program = f"pagefleet worker, rank {rank}"
    settings = parse(WorkerSettings, arguments, prog=program)
    configure_logging(f"worker, rank {rank}", logging.WARNING)  # rank 0 says how far it is
    share = Share(int(rank), settings.tensor_parallel_size)
    try:
        ranks = meet(share, settings, int(rendezvous))
        engine = load_engine(Path(settings.model), settings, lambda: None, ranks)
    except (ManifestError, ValueError, OSError) as error:
        refuse(program, error)
    gc.collect()
    gc.freeze()
    threading.Thread(target=beat, args=(Connection(int(signs)),), name="signs", daemon=True).start()
    follow(engine, orders(Connection(int(fd))))


def beat(signs: Connection) -> None:
    """Give signs of life, until rank 0 is gone."""
    with suppress(OSError):
        while True:
            signs.send_bytes(b"")
            time.sleep(SIGN_SECONDS)


def orders(connection: Connection) -> Iterator[Order]:
    """What rank 0 says, until it is gone."""
    decoder = msgspec.msgpack.Decoder(Order)
    with suppress(EOFError, ConnectionError):
        while True:
            yield decoder.decode(connection.recv_bytes())


def follow(engine: TorchEngine, orders: Iterator[Order]) -> None:
    """Do what rank 0 does, and leave its answers to it."""
    under_way: deque[Pending] = deque()
    for order in orders:
        while len(under_way) > order.under_way:
            under_way.popleft().settle()
        if order.plan is None:
            engine.reset()
            continue
        with suppress(PlanError):  # rank 0 says so, and begins an epoch
            under_way.append(engine.launch(order.plan))


if __name__ == "__main__":
    run_to_end(main)
