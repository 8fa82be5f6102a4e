"""A worker's shell: the scheduler's plans go to the compute thread, its results go back.

Two threads. The compute thread owns the engine and does nothing but steps. The I/O thread (the main
one) owns the socket, says Hello and beats; it reports the progress that the compute thread makes,
so that a hung computation is seen although the process answers.

An epoch begins when the scheduler answers a Hello with Join, and ends when it says Fence, when a
plan contradicts the slots, or when a step fails: the worker then says Hello again, empty.
"""

import logging
import os
import queue
import signal
import socket
import threading
import time
from collections import OrderedDict
from types import FrameType

import zmq

from pagefleet.host import host_id, start_time
from pagefleet.transport import Peer
from pagefleet.wire import (
    PROTOCOL,
    Fence,
    Join,
    Message,
    Plan,
    Refused,
    ToWorker,
    WireError,
    WorkerBeat,
    WorkerBye,
    WorkerHello,
    decode_to_worker,
    encode,
)
from pagefleet_worker.interface import Engine, PlanError

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.2
HELLO_SECONDS = 0.5
REMEMBERED_RESULTS = 2


class Progress:
    """A counter that the compute thread advances at every layer."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        """One layer is done."""
        self.count += 1


class Compute(threading.Thread):
    """Runs an engine: takes epochs and plans, gives the frames of results."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(name="compute", daemon=True)
        self.busy = False
        self.wake, self._waker = socket.socketpair()
        self._engine = engine
        self._orders: queue.SimpleQueue[int | Plan] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, int, bytes | None]] = queue.SimpleQueue()

    def begin(self, epoch: int) -> None:
        """Forget everything; what is ordered from now on belongs to `epoch`."""
        self._orders.put(epoch)

    def order(self, plan: Plan) -> None:
        """Run a plan after those that were ordered before."""
        self._orders.put(plan)

    def answers(self) -> list[tuple[int, int, bytes | None]]:
        """(epoch, step, frame of the result) of steps that are done; None: the step failed."""
        self.wake.recv(4096)
        answers = []
        while not self._answers.empty():
            answers.append(self._answers.get_nowait())
        return answers

    def run(self) -> None:
        """The thread's body."""
        epoch = None
        while True:
            self.busy = not self._orders.empty()
            order = self._orders.get()
            self.busy = True
            if isinstance(order, int):
                epoch = order
                self._engine.reset()
            elif order.epoch == epoch:
                frame = self._step(order)
                if frame is None:
                    epoch = None
                self._answers.put((order.epoch, order.step, frame))
                self._waker.send(b"\0")

    def _step(self, plan: Plan) -> bytes | None:
        try:
            return encode(self._engine.launch(plan).result())
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
        self._peer = Peer(endpoint, zmq.Context.instance())
        self._compute = Compute(engine)
        self._progress = progress
        facts = engine.facts
        self._hello = WorkerHello(
            protocol=PROTOCOL,
            host=host_id(),
            pid=os.getpid(),
            started=start_time(os.getpid()),
            fingerprint=facts.fingerprint,
            numerics=facts.numerics,
            block_size=facts.block_size,
            blocks=facts.blocks,
            slots=facts.slots,
            max_model_len=facts.max_model_len,
            max_batched_tokens=facts.max_batched_tokens,
            vocab_size=facts.vocab_size,
        )
        self._epoch: int | None = None
        self._answered: OrderedDict[int, bytes] = OrderedDict()
        self._ordered = -1
        self._stopping = False
        self._woken, self._waker = socket.socketpair()

    def run(self) -> None:
        """Work until a signal says stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        self._compute.start()
        poller = zmq.Poller()
        for readable in (self._peer.socket, self._compute.wake, self._woken):
            poller.register(readable, zmq.POLLIN)
        due = 0.0
        while not self._stopping:
            if (now := time.monotonic()) >= due:
                due = now + self._greet()
            wait_ms = int(max(0.0, due - time.monotonic()) * 1000) + 1
            ready = dict(poller.poll(wait_ms))
            if self._compute.wake.fileno() in ready:
                self._send_answers()
            if self._peer.socket in ready:
                for frame in self._peer.receive():
                    self._receive(frame)
        if self._epoch is not None:
            self._peer.send(encode(WorkerBye(self._epoch)))
            time.sleep(0.05)
        self._peer.close()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        self._waker.send(b"\0")

    def _greet(self) -> float:
        """Say Hello or beat; returns the seconds until it is to be said again."""
        message: Message
        if self._epoch is None:
            message, seconds = self._hello, HELLO_SECONDS
        else:
            message = WorkerBeat(self._epoch, self._progress.count, self._compute.busy)
            seconds = BEAT_SECONDS
        return seconds if self._peer.send(encode(message)) else BEAT_SECONDS / 4

    def _send_answers(self) -> None:
        for epoch, step, frame in self._compute.answers():
            if epoch != self._epoch:
                continue
            if frame is None:
                self._leave()
                return
            self._answered[step] = frame
            if len(self._answered) > REMEMBERED_RESULTS:
                self._answered.popitem(last=False)
            self._peer.send(frame)

    def _receive(self, frame: bytes) -> None:
        try:
            message: ToWorker = decode_to_worker(frame)
        except WireError as error:
            log.warning("dropped a frame of %d bytes: %s", len(frame), error)
            return
        match message:
            case Plan():
                self._plan(message)
            case Join():
                self._join(message.epoch)
            case Fence():
                if self._epoch is not None:
                    log.warning("fenced: %s", message.text)
                    self._leave()
            case Refused():
                log.error("refused: %s", message.text)

    def _join(self, epoch: int) -> None:
        log.info("joined under epoch %d", epoch)
        self._epoch, self._ordered = epoch, -1
        self._answered.clear()
        self._compute.begin(epoch)

    def _leave(self) -> None:
        """End the epoch, and ask for another."""
        if self._epoch is not None:
            self._peer.send(encode(WorkerBye(self._epoch)))
        self._epoch = None
        self._peer.send(encode(self._hello))

    def _plan(self, plan: Plan) -> None:
        if plan.epoch != self._epoch:
            return
        if plan.step > self._ordered:
            self._ordered = plan.step
            self._compute.order(plan)
        elif plan.step in self._answered:
            self._peer.send(self._answered[plan.step])
