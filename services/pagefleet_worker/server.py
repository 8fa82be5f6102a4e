"""A worker's shell: sockets, threads and signals around `membership.Membership`.

One thread computes (`compute`). The main one, of this module, owns the socket; it reports the
progress that the other makes, so that a hung computation is seen although the process answers.
While a process that the engine needs gives no sign of life, the worker gives none itself.

A worker that was shut out and is not let in again, because its computation is stuck or its
connection is, gives itself up, so that whoever started it starts another. So does one whose device
is lost, and at once: it would fail every step that it is trusted with.
"""

import logging
import os
import signal
import socket
import time
from types import FrameType

import zmq

from pagefleet.cell_key import CellKey
from pagefleet.host import host_id, start_time
from pagefleet.notify import Notifier
from pagefleet.transport import Peer
from pagefleet.wire import Fence, Join, Refused, WireError, WorkerHello, decode_to_worker, encode
from pagefleet_worker.compute import Compute, Progress
from pagefleet_worker.interface import Engine, EngineFacts
from pagefleet_worker.membership import BEAT_SECONDS, Membership, Reaction

log = logging.getLogger(__name__)

FAREWELL_MS = 200
"""That the last messages have to get out."""

ALONE_SECONDS = 2.0
"""Without a scheduler, after which the worker says so."""

SHUT_OUT_SECONDS = 10.0
"""After a fence, within which a worker has to be a member again."""


class ShutOutError(Exception):
    """The scheduler fenced this worker, which did not become a member again in time."""


class ComputeEndedError(Exception):
    """The thread that computes has ended."""


class Server:
    """Keeps the worker a member of the scheduler's cell.

    Raises:
        EndpointError: the scheduler's address is refused.
    """

    def __init__(
        self, endpoint: str, engine: Engine, progress: Progress, key: CellKey | None = None
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peer = Peer(endpoint, self._context, key)
        self._engine, self._compute = engine, Compute(engine)
        self._progress = progress
        self._membership = Membership(hello_of(engine.facts))
        self._notifier = Notifier()
        self._alone: float | None = None
        """Since when, unless it is a member or has said so."""
        self._fenced: float | None = None
        """When, unless it became a member again."""
        self._refusal = ""
        """Why it is not let in, as far as it has said so."""
        self._stopping = False
        self._woken, self._waker = socket.socketpair()

    def run(self) -> None:
        """Work until a signal says stop.

        Raises:
            ShutOutError: there is no way back into the cell.
            ComputeEndedError: there is nobody to do the work.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        self._compute.start()
        self._alone = time.monotonic()
        poller = zmq.Poller()
        for readable in (self._peer.socket, self._compute.wake, self._woken):
            poller.register(readable, zmq.POLLIN)
        while not self._stopping:
            now, lives = time.monotonic(), self._engine.lives()
            if lives:
                self._notifier.beat(now, ready=self._membership.epoch is not None)
            if not self._compute.is_alive():
                raise ComputeEndedError("the device is lost")
            self._give_up_if_shut_out(now)
            self._tell_if_alone(now)
            self._carry_out(self._membership.tick(now, self._progress.count, lives))
            wait = max(0.0, min(self._membership.due - time.monotonic(), BEAT_SECONDS))
            ready = dict(poller.poll(int(wait * 1000) + 1))
            if self._compute.wake.fileno() in ready:
                for plan, result in self._compute.answers():
                    self._carry_out(self._membership.computed(plan, result))
            if self._peer.socket in ready:
                for frame in self._peer.receive():
                    self._receive(frame)
        self._carry_out(self._membership.leave())
        self._peer.socket.setsockopt(zmq.LINGER, FAREWELL_MS)
        self._peer.close()
        self._context.term()
        self._notifier.close()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        self._waker.send(b"\0")

    def _give_up_if_shut_out(self, now: float) -> None:
        if self._membership.epoch is not None:
            self._fenced = None
        elif self._fenced is not None and now - self._fenced > SHUT_OUT_SECONDS:
            raise ShutOutError(f"fenced, and not let in again for {SHUT_OUT_SECONDS:g} s")

    def _tell_if_alone(self, now: float) -> None:
        if self._membership.epoch is not None:
            self._alone = now
        elif self._alone is not None and now - self._alone > ALONE_SECONDS:
            self._alone = None
            log.warning("this worker waits: %s", self._peer.silence("--worker-endpoint"))

    def _receive(self, frame: bytes) -> None:
        try:
            message = decode_to_worker(frame)
        except WireError as error:
            log.warning("dropped a frame of %d bytes: %s", len(frame), error)
            return
        if isinstance(message, Join):
            log.info("may join under epoch %d", message.epoch)
            self._refusal = ""
        elif isinstance(message, Fence | Refused) and message.text != self._refusal:
            self._refusal, self._alone = message.text, None
            log.warning("shut out by the scheduler: %s", message.text)
        if isinstance(message, Fence) and self._fenced is None:
            self._fenced = time.monotonic()
        self._carry_out(self._membership.handle(message))

    def _carry_out(self, reaction: Reaction) -> None:
        for order in reaction.orders:
            self._compute.order(order)
        for message in reaction.messages:
            if not self._peer.send(encode(message)):
                self._membership.unsent(message, time.monotonic())


def hello_of(facts: EngineFacts) -> WorkerHello:
    """What this process says of itself."""
    return facts.hello(host_id(), os.getpid(), start_time(os.getpid()))
