"""The compute thread and a device that is late: plans are launched ahead, and answered in order."""

import gc
import multiprocessing
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import zmq

from pagefleet.transport import Hub
from pagefleet.wire import Join, Plan, Result, WorkerHello, decode_from_worker, encode
from pagefleet_worker.compute import Compute, Progress, log
from pagefleet_worker.interface import DeviceLostError, EngineFacts, PlanError
from pagefleet_worker.server import ComputeEndedError, Server

FACTS = EngineFacts("model", "class", 16, 8, 4, 64, 64, 100)


class Flight:
    """A step that is done when it is told so."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.done = threading.Event()
        self.error: Exception | None = None

    def ready(self) -> bool:
        return self.done.is_set()

    def result(self) -> Result:
        self.done.wait()
        if self.error is not None:
            raise self.error
        return Result(self.plan.epoch, self.plan.step, b"")


class LateDevice:
    """An engine whose steps take until somebody ends them; `steps` are launched, `epochs` begun."""

    facts = FACTS

    def __init__(self) -> None:
        self.steps: list[Flight] = []
        self.epochs = 0
        self.refuses: set[int] = set()
        self._launched = threading.Condition()

    def lives(self) -> bool:
        return True

    def reset(self) -> None:
        with self._launched:
            self.epochs += 1
            self._launched.notify_all()

    def launch(self, plan: Plan) -> Flight:
        if plan.step in self.refuses:
            raise PlanError("refused")
        with self._launched:
            self.steps.append(Flight(plan))
            self._launched.notify_all()
        return self.steps[-1]

    def wait(self, steps: int, epochs: int = 1) -> None:
        with self._launched:
            there = lambda: (len(self.steps), self.epochs) == (steps, epochs)  # noqa: E731
            assert self._launched.wait_for(there, timeout=20)


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def compute(device: LateDevice) -> Iterator[Compute]:
    compute = Compute(device)
    compute.wake.settimeout(20)
    compute.start()
    compute.order(1)
    device.wait(0)
    yield compute
    for flight in device.steps:
        flight.done.set()


def plan(step: int, epoch: int = 1) -> Plan:
    return Plan(epoch, step, b"", b"")


def answered(compute: Compute, count: int) -> list[tuple[int, bool]]:
    """(step, whether it gave a result) of the next answers."""
    answers: list[tuple[int, bool]] = []
    while len(answers) < count:
        answers += [(plan.step, result is not None) for plan, result in compute.answers()]
    return answers


def test_the_next_step_is_launched_before_the_last_is_done(
    compute: Compute, device: LateDevice
) -> None:
    compute.order(plan(0))
    compute.order(plan(1))
    device.wait(2)
    device.steps[1].done.set()
    device.steps[0].done.set()
    assert answered(compute, 2) == [(0, True), (1, True)]


def test_no_more_than_two_are_under_way(compute: Compute, device: LateDevice) -> None:
    for step in range(3):
        compute.order(plan(step))
    device.wait(2)
    device.steps[0].done.set()
    assert answered(compute, 1) == [(0, True)]
    device.wait(3)


def test_a_plan_that_is_refused_ends_the_epoch_behind_it(
    compute: Compute, device: LateDevice
) -> None:
    device.refuses = {1}
    compute.order(plan(0))
    device.wait(1)
    compute.order(plan(1))
    compute.order(plan(2))
    device.steps[0].done.set()
    assert answered(compute, 3) == [(0, True), (1, False), (2, False)]
    device.wait(1)


def test_a_step_that_fails_takes_those_behind_it_along(
    compute: Compute, device: LateDevice
) -> None:
    compute.order(plan(0))
    compute.order(plan(1))
    device.wait(2)
    device.steps[0].error = RuntimeError("out of memory")
    device.steps[0].done.set()
    device.steps[1].done.set()
    assert answered(compute, 2) == [(0, False), (1, False)]


def test_an_epoch_begins_when_all_before_it_is_answered(
    compute: Compute, device: LateDevice
) -> None:
    compute.order(plan(0))
    device.wait(1)
    compute.order(2)
    compute.order(plan(0, epoch=2))
    device.steps[0].done.set()
    assert answered(compute, 1) == [(0, True)]
    device.wait(2, epochs=2)
    device.steps[1].done.set()
    assert answered(compute, 1) == [(0, True)]


def test_a_lost_device_ends_the_thread_and_answers_nothing(
    compute: Compute, device: LateDevice
) -> None:
    compute.order(plan(0))
    compute.order(plan(1))
    device.wait(2)
    device.steps[0].error = DeviceLostError("an illegal memory access was encountered")
    device.steps[0].done.set()
    compute.join(20)
    assert not compute.is_alive()
    with compute.wake:
        assert not compute.answers()


class Memory:
    """What a device used."""


class DeviceThatLoses(LateDevice):
    """It is lost in a step that holds memory."""

    def launch(self, plan: Plan) -> Flight:
        memory = Memory()
        self.memory = weakref.ref(memory)
        raise DeviceLostError("an illegal memory access was encountered")


def test_nothing_that_a_lost_device_used_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "disabled", True)  # pytest keeps what is logged, the error too
    device = DeviceThatLoses()
    compute = Compute(device)
    compute.order(1)
    compute.order(plan(0))
    compute.start()
    compute.join(20)
    gc.collect()
    assert device.memory() is not None
    compute.wake.close()


class LostDevice(LateDevice):
    """No step of it is ever done."""

    def launch(self, plan: Plan) -> Flight:
        raise DeviceLostError("the GPU has fallen off the bus")


def serve_in_vain(endpoint: str) -> None:
    with suppress(ComputeEndedError):
        Server(endpoint, LostDevice(), Progress()).run()
        os._exit(1)
    os._exit(3)


def test_a_worker_without_a_device_gives_itself_up(tmp_path: Path) -> None:
    endpoint, context = f"ipc://{tmp_path}/workers", zmq.Context[zmq.Socket[bytes]]()
    worker = multiprocessing.get_context("spawn").Process(target=serve_in_vain, args=(endpoint,))
    worker.start()
    with closing(Hub(endpoint, context)) as hub:
        while worker.is_alive():
            hub.socket.poll(100)
            for peer, frame in hub.receive():
                if isinstance(decode_from_worker(frame), WorkerHello):
                    hub.send(peer, encode(Join(1)))
                    hub.send(peer, encode(plan(0)))
    context.term()
    assert worker.exitcode == 3
