"""A worker's shell: sockets, threads and signals around `membership.Membership`.

Two threads. The compute thread owns the engine and does nothing but steps. The I/O thread (the main
one) owns the socket; it reports the progress that the compute thread makes, so that a hung
computation is seen although the process answers. While a process that the engine needs gives no
sign of life, the worker gives none itself.

A worker that was shut out and is not let in again, because its computation is stuck or its
connection is, gives itself up, so that whoever started it starts another. So does one whose device
is lost, and at once: it would fail every step that it is trusted with.
"""

import logging
import os
import queue
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TypeVar

import zmq

from pagefleet import faultpoints
from pagefleet.cell_key import CellKey
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
from pagefleet_worker.interface import (
    DeviceLostError,
    Engine,
    EngineFacts,
    Launched,
    PlanError,
)
from pagefleet_worker.membership import BEAT_SECONDS, Membership, Reaction

log = logging.getLogger(__name__)

_Made = TypeVar("_Made")

DEPTH = 2
"""Steps that may be under way on the device at once."""

POLL_SECONDS = 100e-6
"""Between two looks at the device, while a step is under way and no plan has come."""

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


class Progress:
    """A counter that the compute thread advances at every layer."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        """One layer is done."""
        self.count += 1


class Compute(threading.Thread):
    """Runs an engine: takes epochs and plans, answers every plan.

    A plan that comes while a step is under way on the device is launched before that step's result
    is taken. It may be deep inside a step when the process is to end, and is not waited for.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(name="compute", daemon=True)
        self.wake, self._waker = socket.socketpair()
        self._engine = engine
        self._epoch: int | None = None
        self._flights: deque[tuple[Plan, Launched]] = deque()
        """Plans that are launched and not answered."""
        self._orders: queue.SimpleQueue[int | Plan] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Plan, Result | None]] = queue.SimpleQueue()
        self._loss: DeviceLostError | None = None
        """Kept with all that its frames hold: to give back what a lost device used aborts."""

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
        """The thread's body; it ends with the device, and wakes who waits for its answers."""
        with self._waker:
            try:
                self._work()
            except DeviceLostError as error:
                self._loss = error
                log.error("%s", error)

    def _work(self) -> None:
        while True:
            order = self._next_order()
            if isinstance(order, Plan):
                self._launch(order)
            elif order is None:
                self._land()
            else:
                while self._flights:
                    self._land()
                self._epoch = order
                self._engine.reset()

    def _next_order(self) -> int | Plan | None:
        """What to do next; None: take the result of the step that has been under way longest."""
        while self._flights:
            if len(self._flights) == DEPTH or self._flights[0][1].ready():
                return None
            with suppress(queue.Empty):
                return self._orders.get(timeout=POLL_SECONDS)
        return self._orders.get()

    def _launch(self, plan: Plan) -> None:
        launched = self._tried(plan, self._begin)
        if launched is not None:
            self._flights.append((plan, launched))
            return
        while self._flights:
            self._land()
        self._answer(plan, None)

    def _begin(self, plan: Plan) -> Launched:
        faultpoints.reach("worker.step")
        return self._engine.launch(plan)

    def _land(self) -> None:
        plan, launched = self._flights.popleft()
        self._answer(plan, self._tried(plan, lambda _: launched.result()))

    def _answer(self, plan: Plan, result: Result | None) -> None:
        if result is None:
            self._epoch = None
        self._answers.put((plan, result))
        self._waker.send(b"\0")

    def _tried(self, plan: Plan, work: Callable[[Plan], _Made]) -> _Made | None:
        """Do a part of a step; None if it fails, or a step of its epoch has failed."""
        if plan.epoch != self._epoch:
            return None
        try:
            return work(plan)
        except PlanError as error:
            log.error("step %d contradicts the slots: %s", plan.step, error)
        except DeviceLostError:
            raise
        except Exception:
            log.exception("step %d failed", plan.step)
        return None


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
