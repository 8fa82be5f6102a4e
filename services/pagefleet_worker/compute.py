"""The thread that computes: it owns the engine, and does nothing but steps.

Epochs and plans come through a queue, and every plan is answered through another, which wakes who
waits at a socket. Up to `DEPTH` steps are under way on the device at once: a plan that comes
meanwhile is launched before the result of the step before it is taken.
"""

import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from pagefleet import faultpoints
from pagefleet.wire import Plan, Result
from pagefleet_worker.interface import DeviceLostError, Engine, Launched, PlanError

log = logging.getLogger(__name__)

_Made = TypeVar("_Made")

DEPTH = 2
"""Steps that may be under way on the device at once."""

POLL_SECONDS = 100e-6
"""Between two looks at the device, while a step is under way and no plan has come."""


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
