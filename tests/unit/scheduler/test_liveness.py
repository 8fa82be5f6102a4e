"""How soon a worker that makes no progress is given up, and when a cell counts as stalled."""

from collections.abc import Callable

import pytest

from pagefleet.wire import (
    PROTOCOL,
    Fence,
    GatewayBeat,
    GatewayHello,
    Message,
    OpenRequest,
    Pulse,
    WorkerBeat,
)
from pagefleet_scheduler.liveness import FIRST_WORD, LONGEST_SILENCE, WORKER_SILENCE
from tests.unit.scheduler.core_cell import Cell

BEAT, TICK = 0.2, 0.05
"""Seconds: of gateways and workers, of the scheduler."""

HEALTH = 2.0
"""Seconds within which /health says that the only worker makes no progress."""


@pytest.fixture
def cell() -> Cell:
    """One worker that computes, one gateway that waits for it."""
    cell = Cell()
    cell.tell(b"g", GatewayHello(PROTOCOL))
    cell.submit(max_tokens=50)
    return cell


def last_pulse(cell: Cell) -> Pulse:
    return [message for _, message in cell.sent if isinstance(message, Pulse)][-1]


def pass_time(
    cell: Cell,
    seconds: float,
    beat: Callable[[int], WorkerBeat | None],
    until: Callable[[Message], bool] = lambda message: False,
    phase: int = 0,
) -> float:
    """Tick until something is sent; the seconds that took, or `seconds`.

    The gateway beats, and so does the worker with what `beat` makes of the number of the beat; both
    for the first time `phase` ticks earlier than after a whole interval.
    """
    count = 0
    for passed in range(1, round(seconds / TICK) + 1):
        cell.now += TICK
        known = len(cell.sent)
        cell.events()
        if (passed + phase) % round(BEAT / TICK) == 0:
            count += 1
            if (message := beat(count)) is not None:
                cell.tell(b"w", message)
            cell.tell(b"g", GatewayBeat([OpenRequest("r", 0, {0: 0})]))
        if any(until(message) for _, message in cell.sent[known:]):
            return passed * TICK
    return seconds


def says_no_worker(message: Message) -> bool:
    return isinstance(message, Pulse) and not message.workers


def says_stalled(message: Message) -> bool:
    return isinstance(message, Pulse) and message.stalled


@pytest.mark.parametrize("phase", range(4))
@pytest.mark.parametrize("busy", [True, False])
def test_a_worker_that_falls_silent_is_found_in_time(cell: Cell, busy: bool, phase: int) -> None:
    """Its process is stopped: the gateway is told so early that /health keeps its word."""
    epoch = cell.join()
    pass_time(cell, 1.0, lambda count: WorkerBeat(epoch, count, busy))
    found = pass_time(cell, 5.0, lambda count: None, says_no_worker, phase)
    assert found <= HEALTH - TICK


@pytest.mark.parametrize("phase", range(4))
def test_a_computation_that_hangs_is_found_in_time(cell: Cell, phase: int) -> None:
    """Its process goes on beating."""
    epoch = cell.join()
    pass_time(cell, 1.0, lambda count: WorkerBeat(epoch, count, True))
    found = pass_time(cell, 5.0, lambda count: WorkerBeat(epoch, 5, True), says_no_worker, phase)
    assert found <= HEALTH - TICK


def test_requests_that_nobody_computes_are_a_stall(cell: Cell) -> None:
    assert pass_time(cell, 5.0, lambda count: None, says_stalled) < 3
    assert cell.scheduler.stalled
    epoch = cell.join()
    cell.answer(cell.plans()[0], 50)
    pass_time(cell, BEAT, lambda count: WorkerBeat(epoch, 0, True))
    assert not cell.scheduler.stalled
    assert not last_pulse(cell).stalled


def test_a_step_that_takes_long_is_no_stall(cell: Cell) -> None:
    """No result comes for ten seconds, but layer after layer is computed."""
    epoch = cell.join()
    stalled = pass_time(
        cell,
        10.0,
        lambda count: WorkerBeat(epoch, count // 3, True),
        lambda message: isinstance(message, Fence) or says_stalled(message),
    )
    assert stalled == 10.0


def test_the_first_request_after_a_rest_is_no_stall() -> None:
    cell = Cell()
    epoch = cell.join()
    pass_time(cell, 5.0, lambda count: WorkerBeat(epoch, 0, False))
    cell.submit()
    pulse = cell.tell(b"g", GatewayBeat([OpenRequest("r", 0, {0: 0})]))[-1]
    assert isinstance(pulse, Pulse)
    assert not pulse.stalled


@pytest.mark.parametrize(
    ("pause", "patience"), [(0.2, WORKER_SILENCE), (0.6, 1.2), (1.4, LONGEST_SILENCE)]
)
def test_whose_words_were_late_is_waited_for_longer(
    cell: Cell, pause: float, patience: float
) -> None:
    cell.join()
    worker = next(iter(cell.scheduler.workers))
    assert not worker.silent(cell.now + FIRST_WORD)
    for words in range(3):
        worker.hear(cell.now + words * pause)
    heard = cell.now + 2 * pause
    assert not worker.silent(heard + patience - 0.01)
    assert worker.silent(heard + patience + 0.01)


def test_the_time_until_its_first_word_says_nothing_of_the_next(cell: Cell) -> None:
    cell.join()
    worker = next(iter(cell.scheduler.workers))
    worker.hear(cell.now + 1.4)
    assert worker.silent(cell.now + 1.4 + WORKER_SILENCE + 0.01)


def test_a_worker_whose_results_come_is_not_silent(cell: Cell) -> None:
    cell.join()
    for number in range(8):
        cell.now += 0.4
        cell.tell(b"g", GatewayHello(PROTOCOL))
        cell.answer(cell.plans()[number], 50)
    assert not [message for _, message in cell.sent if isinstance(message, Fence)]


def test_whose_layers_are_slow_is_not_taken_to_hang(cell: Cell) -> None:
    epoch = cell.join()
    worker = next(iter(cell.scheduler.workers))
    for layer in range(3):
        worker.beat(WorkerBeat(epoch, layer, True), cell.now + layer * 0.5)
    progressed = cell.now + 2 * 0.5
    assert not worker.hangs(progressed + 4 * 0.5 - 0.01)
    assert worker.hangs(progressed + 4 * 0.5 + 0.01)


def test_a_cell_without_requests_is_never_stalled() -> None:
    cell = Cell()
    epoch = cell.join()
    pass_time(cell, 5.0, lambda count: WorkerBeat(epoch, 0, False))
    assert not cell.scheduler.stalled
