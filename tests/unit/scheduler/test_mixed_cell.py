"""Workers of different sizes: what only the large one can hold waits for it, for a while."""

import pytest

from pagefleet.wire import (
    PROTOCOL,
    GatewayHello,
    Open,
    Reason,
    Rejected,
    Welcome,
    WorkerBeat,
    WorkerBye,
    pack_ints,
)
from pagefleet_scheduler.core import Scheduler
from tests.unit.scheduler.core_cell import EPOCH, Cell

WAIT = 10.0
LARGE, SMALL = 25, 4
"""Blocks, of four tokens each."""
PROMPT = 40
"""Tokens that only the large worker can hold."""


class MixedCell(Cell):
    """A large worker and a small one, which compute until they are lost."""

    def __init__(self) -> None:
        super().__init__(Scheduler(EPOCH, check=True, worker_wait=WAIT))
        self.settle()
        self.epochs: dict[bytes, int] = {}
        self.start(b"large", LARGE)
        self.start(b"small", SMALL)

    def start(self, peer: bytes, blocks: int) -> None:
        self.epochs[peer] = self.join(peer, blocks)

    def lose(self, peer: bytes) -> None:
        self.tell(peer, WorkerBye(self.epochs.pop(peer)))

    def live(self, seconds: float) -> None:
        """Let time pass in which all that are there are heard."""
        for _ in range(round(seconds / 0.2)):
            self.now += 0.2
            self.tell(b"g", GatewayHello(PROTOCOL))
            for peer, epoch in self.epochs.items():
                self.tell(peer, WorkerBeat(epoch, int(10 * self.now), True))

    def opened(self) -> list[Open]:
        """What the large worker was given since it began last."""
        plans = [plan for plan in self.plans(b"large") if plan.epoch == self.epochs[b"large"]]
        return [order for plan in plans for order in plan.opens]

    def refused(self) -> list[tuple[str, Reason]]:
        sent = [message for _, message in self.sent if isinstance(message, Rejected)]
        return [(message.request, message.reason) for message in sent]

    def longest(self) -> int:
        """Tokens that the cell says a request may have."""
        (welcome,) = self.tell(b"g", GatewayHello(PROTOCOL))
        assert isinstance(welcome, Welcome)
        return welcome.max_model_len


@pytest.fixture
def cell() -> MixedCell:
    cell = MixedCell()
    cell.submit("runs", prompt=PROMPT, max_tokens=9)
    cell.answer(cell.plans(b"large")[0], 50, peer=b"large")
    cell.lose(b"large")
    cell.submit("comes", prompt=PROMPT)
    return cell


def test_what_ran_and_what_comes_wait_and_go_on(cell: MixedCell) -> None:
    """Meanwhile others are served, and nobody is told that less fits."""
    cell.live(WAIT - 1)
    assert cell.longest() == 4 * LARGE
    cell.submit("short")
    assert len(cell.plans(b"small")) == 2
    cell.start(b"large", LARGE)
    assert [order.output for order in cell.opened()] == [pack_ints([50]), b""]
    assert cell.refused() == []


def test_who_waits_is_refused_once_when_it_does_not_come_back(cell: MixedCell) -> None:
    cell.live(WAIT - 1)
    assert cell.refused() == []
    cell.live(2.5)
    assert cell.refused() == [("runs", Reason.TOO_LONG), ("comes", Reason.TOO_LONG)]
    assert cell.longest() == 4 * SMALL
    cell.submit("late", prompt=PROMPT)
    assert cell.refused()[2:] == [("late", Reason.TOO_LONG)]


def test_one_that_comes_back_smaller_takes_what_fits_it(cell: MixedCell) -> None:
    cell.submit("fits", prompt=PROMPT // 2)
    cell.start(b"large", LARGE // 2 - 2)
    assert [len(order.prompt) // 4 for order in cell.opened()] == [PROMPT // 2]
    cell.live(WAIT + 1.5)
    assert [request for request, _ in cell.refused()] == ["runs", "comes"]
    assert cell.longest() == 4 * (LARGE // 2 - 2)


def test_what_did_not_fit_the_lost_worker_either_is_refused_at_once(cell: MixedCell) -> None:
    cell.submit("long", prompt=4 * LARGE + 1)
    assert cell.refused() == [("long", Reason.TOO_LONG)]


def test_the_deaths_of_others_do_not_prolong_the_wait(cell: MixedCell) -> None:
    """A small worker that dies again and again is no reason to expect the large one."""
    for _ in range(4):
        cell.live(WAIT / 4)
        cell.lose(b"small")
        cell.start(b"small", SMALL)
    cell.live(2.5)
    assert [request for request, _ in cell.refused()] == ["runs", "comes"]


def test_the_time_in_which_the_scheduler_was_stopped_does_not_count(cell: MixedCell) -> None:
    cell.live(WAIT - 3)
    cell.now += 3 * WAIT
    cell.live(2)
    assert cell.refused() == []
    cell.live(2.5)
    assert cell.refused() == [("runs", Reason.TOO_LONG), ("comes", Reason.TOO_LONG)]
