"""A worker's shell: sockets, threads and signals around `membership.Membership`.

Two threads. The compute thread owns the engine and does nothing but steps. The I/O thread (the main
one) owns the socket; it reports the progress that the compute thread makes, so that a hung
computation is seen although the process answers.

A worker that was shut out and is not let in again, because its computation is stuck or its
connection is, gives itself up, so that whoever started it starts another.
"""

import logging
import os
import queue
import signal
import socket
import threading
import time
from types import FrameType

import zmq

from pagefleet import faultpoints
from pagefleet.host import host_id, start_time
from pagefleet.notify import Notifier
from pagefleet.transport import Peer
from pagefleet.wire import (
    Fence,
    Join,
    Plan,
    Refused,
    Result,
    WireError,
    WorkerHello,
    decode_to_worker,
    encode,
)
from pagefleet_worker.interface import Engine, EngineFacts, PlanError
from pagefleet_worker.membership import BEAT_SECONDS, Membership, Reaction

log = logging.getLogger(__name__)

FAREWELL_MS = 200
"""That the last messages have to get out."""

SHUT_OUT_SECONDS = 10.0
"""After a fence, within which a worker has to be a member again."""


class ShutOutError(Exception):
    """The scheduler fenced this worker, which did not become a member again in time."""


class Progress:
    """A counter that the compute thread advances at every layer."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        """One layer is done."""
        self.count += 1


class Compute(threading.Thread):
    """Runs an engine: takes epochs and plans, answers every plan.

    It may be deep inside a step when the process is to end, and is not waited for.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(name="compute", daemon=True)
        self.wake, self._waker = socket.socketpair()
        self._engine = engine
        self._orders: queue.SimpleQueue[int | Plan] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Plan, Result | None]] = queue.SimpleQueue()

    def order(self, order: int | Plan) -> None:
        """Forget everything and begin an epoch, or run a step of it; after what came before."""
        self._orders.put(order)

    def answers(self) -> list[tuple[Plan, Result | None]]:
        """Plans that are done with; without a result if the step, or one before it, failed."""
        self.wake.recv(4096)
        answers = []
        while not self._answers.empty():
            answers.append(self._answers.get_nowait())
        return answers

    def run(self) -> None:
        """The thread's body."""
        epoch = None
        while True:
            order = self._orders.get()
            if isinstance(order, int):
                epoch = order
                self._engine.reset()
                continue
            result = self._step(order) if order.epoch == epoch else None
            if result is None:
                epoch = None
            self._answers.put((order, result))
            self._waker.send(b"\0")

    def _step(self, plan: Plan) -> Result | None:
        try:
            faultpoints.reach("worker.step")
            return self._engine.launch(plan).result()
        except PlanError as error:
            log.error("step %d contradicts the slots: %s", plan.step, error)
        except Exception:
            log.exception("step %d failed", plan.step)
        return None


class Server:
    """Keeps the worker a member of the scheduler's cell.

    Raises:
        EndpointError: the scheduler's address is refused.
    """

    def __init__(self, endpoint: str, engine: Engine, progress: Progress) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peer = Peer(endpoint, self._context)
        self._compute = Compute(engine)
        self._progress = progress
        self._membership = Membership(hello_of(engine.facts))
        self._notifier = Notifier()
        self._fenced: float | None = None
        """When, unless it became a member again."""
        self._stopping = False
        self._woken, self._waker = socket.socketpair()

    def run(self) -> None:
        """Work until a signal says stop.

        Raises:
            ShutOutError: there is no way back into the cell.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        self._compute.start()
        poller = zmq.Poller()
        for readable in (self._peer.socket, self._compute.wake, self._woken):
            poller.register(readable, zmq.POLLIN)
        while not self._stopping:
            now = time.monotonic()
            self._notifier.beat(now, ready=self._membership.epoch is not None)
            self._give_up_if_shut_out(now)
            self._carry_out(self._membership.tick(now, self._progress.count))
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

    def _receive(self, frame: bytes) -> None:
        try:
            message = decode_to_worker(frame)
        except WireError as error:
            log.warning("dropped a frame of %d bytes: %s", len(frame), error)
            return
        if isinstance(message, Join):
            log.info("may join under epoch %d", message.epoch)
        elif isinstance(message, Fence | Refused):
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
