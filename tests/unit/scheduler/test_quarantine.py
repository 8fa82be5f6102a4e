"""Who is suspected of ending a worker, who runs alone, and who is refused."""

import pytest

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    ChoiceState,
    GatewayHello,
    Message,
    Plan,
    Reason,
    Rejected,
    Result,
    Submit,
    ToScheduler,
    WorkerBye,
    WorkerHello,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.core import Arrived, Lost, Scheduler


class Cell:
    """A scheduler whose workers are lost as a test wants."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(1 << 20, check=True)
        self.workers = 0
        self.sent: list[tuple[bytes, Message]] = []

    def handle(self, *events: Arrived | Lost) -> None:
        beat = Arrived(b"g", GatewayHello(PROTOCOL))
        self.sent += [
            (send.peer, send.message) for send in self.scheduler.handle([*events, beat], 1.0)
        ]

    def tell(self, peer: bytes, message: ToScheduler) -> None:
        self.handle(Arrived(peer, message))

    def join(self) -> bytes:
        self.workers += 1
        peer = b"w%d" % self.workers
        self.tell(peer, WorkerHello(PROTOCOL, "h", 1, 1, "m", "c", 4, 50, 8, 100, 64, 1000))
        return peer

    def submit(self, request: str, prompt: int) -> None:
        params = SamplingParams(max_tokens=30, seed=1)
        tokens = pack_ints([prompt] * prompt)
        self.tell(b"g", Submit(request, 1, tokens, params, [ChoiceState(0)]))

    def plans(self, peer: bytes) -> list[Plan]:
        return [m for to, m in self.sent if to == peer and isinstance(m, Plan)]

    def answer(self, peer: bytes, number: int) -> None:
        """Give a plan's rows a token each."""
        plan = self.plans(peer)[number]
        tokens = [50 + number] * len(_rows(plan))
        self.tell(peer, Result(plan.epoch, plan.step, pack_ints(tokens)))

    def refused(self) -> list[str]:
        rejections = [m for _, m in self.sent if isinstance(m, Rejected)]
        assert all(m.reason is Reason.FAILED and "alone" in m.text for m in rejections)
        return [m.request for m in rejections]


def _rows(plan: Plan) -> list[int]:
    """Numbers of input tokens, which tell the requests of these tests apart."""
    return unpack_ints(plan.rows)[2::6].tolist()


@pytest.fixture
def cell() -> Cell:
    cell = Cell()
    cell.submit("five", 5)
    cell.submit("six", 6)
    return cell


def test_suspects_run_alone_and_only_crashes_alone_count(cell: Cell) -> None:
    first = cell.join()
    assert _rows(cell.plans(first)[0]) == [5, 6]
    cell.handle(Lost(first))
    second = cell.join()
    assert [_rows(plan) for plan in cell.plans(second)] == [[5]]
    cell.handle(Lost(second))
    third = cell.join()
    assert [_rows(plan) for plan in cell.plans(third)] == [[5]]
    assert cell.refused() == []
    cell.handle(Lost(third))
    assert cell.refused() == ["five"]
    fourth = cell.join()
    assert [_rows(plan) for plan in cell.plans(fourth)] == [[6]]


def test_suspects_and_others_take_turns_until_a_token_acquits(cell: Cell) -> None:
    cell.handle(Lost(cell.join()))
    cell.submit("seven", 7)
    worker = cell.join()
    expected = [[7], [5], [1, 1], [6], [1, 1, 1]]
    for number in range(len(expected)):
        while len(cell.plans(worker)) <= number:
            cell.answer(worker, len(cell.plans(worker)) - 1)
    assert [_rows(plan) for plan in cell.plans(worker)][:5] == expected


def test_who_had_a_token_from_the_same_worker_is_no_suspect(cell: Cell) -> None:
    worker = cell.join()
    cell.answer(worker, 0)
    cell.submit("seven", 7)
    cell.answer(worker, 1)
    assert _rows(cell.plans(worker)[-1]) == [1, 1, 7]
    cell.handle(Lost(worker))
    other = cell.join()
    cell.answer(other, 0)
    assert [_rows(plan) for plan in cell.plans(other)] == [[7, 8], [7]]


def test_crashes_that_were_shared_end_nobody(cell: Cell) -> None:
    for _ in range(10):
        worker = cell.join()
        cell.answer(worker, 0)
        cell.handle(Lost(worker))
    assert cell.refused() == []


def test_a_worker_that_leaves_makes_nobody_a_suspect(cell: Cell) -> None:
    """However many are replaced while a request has no token yet; one whose step failed does."""

    def leave(*, failed: bool) -> list[list[int]]:
        """Rows of what was under way at a worker that left."""
        plans = cell.plans(peer := cell.join())
        cell.tell(peer, WorkerBye(plans[-1].epoch, failed))
        return [_rows(plan) for plan in plans]

    for _ in range(5):
        assert leave(failed=False)[0] == [5, 6]
    assert leave(failed=True)[0] == [5, 6]
    assert len(leave(failed=False)[0]) == 1
    assert not cell.refused()
