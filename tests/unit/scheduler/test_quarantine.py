"""Who is suspected of ending a worker, who runs alone, and who is refused."""

from array import array
from itertools import count

import pytest

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    ChoiceState,
    Finish,
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
from pagefleet_scheduler.flights import Accepted, Flight, PlannedRow, Sampled
from pagefleet_scheduler.quarantine import ALIVE, CERTAIN, DOUBTFUL, Quarantine, turns
from pagefleet_scheduler.sequence import Request, Sequence

NUMBERS = count()


class Cell:
    """A scheduler whose workers are lost as a test wants."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(1 << 20, check=True)
        self.workers = 0
        self.now = 1.0
        self.sent: list[tuple[bytes, Message]] = []

    def handle(self, *events: Arrived | Lost) -> None:
        beat = Arrived(b"g", GatewayHello(PROTOCOL))
        sends = self.scheduler.handle([*events, beat], self.now)
        self.sent += [(send.peer, send.message) for send in sends]

    def tell(self, peer: bytes, message: ToScheduler) -> None:
        self.handle(Arrived(peer, message))

    def join(self) -> bytes:
        self.workers += 1
        peer = b"w%d" % self.workers
        self.tell(peer, WorkerHello(PROTOCOL, "h", 1, 1, "m", "c", 4, 50, 8, 100, 64, 1000))
        return peer

    def end(self, peer: bytes) -> None:
        self.handle(Lost(peer))

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
        assert all(m.reason is Reason.QUARANTINED and "alone" in m.text for m in rejections)
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


def test_suspects_run_alone_and_only_deaths_alone_count(cell: Cell) -> None:
    first = cell.join()
    assert _rows(cell.plans(first)[0]) == [5, 6]
    cell.end(first)
    second = cell.join()
    assert [_rows(plan) for plan in cell.plans(second)] == [[5]]
    cell.end(second)
    third = cell.join()
    assert [_rows(plan) for plan in cell.plans(third)] == [[5]]
    assert cell.refused() == []
    cell.end(third)
    assert cell.refused() == ["five"]


def test_who_was_suspected_with_the_guilty_is_cleared(cell: Cell) -> None:
    cell.submit("seven", 7)
    for _ in range(3):
        cell.end(cell.join())
    assert cell.refused() == ["five"]
    assert [_rows(plan) for plan in cell.plans(cell.join())] == [[6, 7], [1, 1]]


def test_suspects_and_others_take_turns_until_a_token_clears(cell: Cell) -> None:
    cell.end(cell.join())
    cell.submit("seven", 7)
    worker = cell.join()
    expected = [[7], [5], [1, 1], [6], [1, 1, 1]]
    for number in range(len(expected)):
        while len(cell.plans(worker)) <= number:
            cell.answer(worker, len(cell.plans(worker)) - 1)
    assert [_rows(plan) for plan in cell.plans(worker)][:5] == expected


def test_who_had_a_token_from_the_same_worker_is_tried_last(cell: Cell) -> None:
    worker = cell.join()
    cell.answer(worker, 0)
    cell.submit("nine", 9)
    cell.answer(worker, 1)
    assert _rows(cell.plans(worker)[-1]) == [1, 1, 9]
    cell.end(worker)
    other = cell.join()
    for number in range(4):
        cell.answer(other, number)
    assert [_rows(plan) for plan in cell.plans(other)][:5] == [[9], [7], [1, 1], [8], [1, 1, 1]]


def test_suspects_run_at_one_worker_while_the_other_goes_on(cell: Cell) -> None:
    workers = [cell.join(), cell.join()]
    busy = next(worker for worker in workers if cell.plans(worker))
    cell.submit("seven", 7)
    cell.submit("eight", 8)
    cell.end(workers[1] if busy == workers[0] else workers[0])
    cell.end(busy)
    third, fourth = cell.join(), cell.join()
    rows = [_rows(plan) for worker in (third, fourth) for plan in cell.plans(worker)]
    assert len([row for row in rows if row in ([5], [6], [7], [8])]) == 1


def test_deaths_that_were_shared_end_nobody(cell: Cell) -> None:
    for _ in range(10):
        worker = cell.join()
        while len(_rows(cell.plans(worker)[-1])) < 2:
            cell.answer(worker, len(cell.plans(worker)) - 1)
        cell.end(worker)
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


def test_each_death_by_chance_asks_for_one_more(cell: Cell) -> None:
    """Workers that compute nothing end, too: so what happens to a suspect may be chance."""
    cell.end(cell.join())
    cell.end(cell.join())
    for chance in range(3):
        idle, busy = cell.join(), cell.join()
        if not cell.plans(idle):
            idle, busy = busy, idle
        cell.end(busy)
        cell.end(idle) if chance < 2 else None
    assert cell.refused() == []


def test_silence_counts_by_half(cell: Cell) -> None:
    cell.end(cell.join())
    for _ in range(4):
        assert cell.refused() == []
        cell.join()
        for _ in range(6):
            cell.now += 0.4
            cell.handle()
    assert cell.refused() == ["five"]


# --- each death by itself --------------------------------------------------------------------


def stream(*, proven: bool = False) -> Sequence:
    number = next(NUMBERS)
    prompt, params = array("i", [1]), SamplingParams(max_tokens=8, seed=1)
    request = Request(f"r{number}", 1, b"g", prompt, params, b"", number, 0.0)
    return Sequence(request, [0], prompt[:], proven=proven)


def flight(*sequences: Sequence, sent: float = 10.0) -> Flight:
    """A step with a row of each."""
    rows = [PlannedRow(each, 0, 1, 1, True, array("i")) for each in sequences]
    return Flight(Plan(1, 0, b"", b""), rows, sent)


def die(court: Quarantine, *sequences: Sequence, evidence: float = CERTAIN) -> list[Request]:
    """A worker is lost that computed these together."""
    return court.judge([flight(*sequences)] if sequences else [], 10.0, evidence)


def gives(court: Quarantine, *sequences: Sequence) -> None:
    """A step gives each a token."""
    sampled = [Sampled(each, array("i", [5]), [None]) for each in sequences]
    court.acquit(Accepted(sampled=sampled))


def test_who_died_alone_for_the_first_time_is_only_suspected() -> None:
    court, suspect = Quarantine(), stream()
    assert die(court, suspect) == []
    assert (suspect.suspicion, suspect.crashes) == (1, 0.0)
    assert die(court, suspect) == []
    assert die(court, suspect) == [suspect.request]


def test_deaths_by_chance_before_its_first_one_alone_do_not_excuse_a_suspect() -> None:
    court, suspect = Quarantine(), stream()
    for _ in range(3):
        die(court)
    die(court, suspect)
    assert die(court, suspect) == []
    assert die(court, suspect) == [suspect.request]


@pytest.mark.parametrize(("silence", "crashes"), [(ALIVE, 1.0), (ALIVE + 0.1, 0.0)])
def test_who_was_sent_to_a_worker_that_may_have_been_dead_is_not_blamed(
    silence: float, crashes: float
) -> None:
    court, suspect = Quarantine(), stream()
    die(court, suspect)
    court.judge([flight(suspect, sent=10.0)], 10.0 - silence, CERTAIN)
    assert suspect.crashes == crashes


def test_who_had_a_token_is_suspected_less_unless_it_was_suspected_before() -> None:
    court, fresh, proven = Quarantine(), stream(), stream(proven=True)
    die(court, fresh, proven)
    assert (fresh.suspicion, proven.suspicion) == (1, 2)
    fresh.proven, proven.proven = True, False
    die(court, fresh, proven)
    assert (fresh.suspicion, proven.suspicion) == (1, 1)
    assert court.suspected == 2


def test_who_is_suspected_of_another_death_too_is_not_cleared_with_the_guilty() -> None:
    court = Quarantine()
    guilty, cleared, suspect, other = [stream() for _ in range(4)]
    die(court, guilty, cleared, suspect)
    die(court, suspect, other)
    die(court, guilty)
    assert die(court, guilty) == [guilty.request]
    assert (cleared.suspicion, suspect.suspicion, other.suspicion) == (0, 1, 1)


def test_a_death_that_nobody_is_left_to_be_suspected_of_was_chance() -> None:
    court, first, second = Quarantine(), stream(), stream()
    die(court, first, second)
    gives(court, first)
    assert court.chance == 0
    court.acquit(Accepted(completed=[second]))
    assert (court.chance, second.suspicion, court.active) == (1, 0, False)


def test_only_a_death_that_was_seen_is_chance_where_nothing_was_computed() -> None:
    court = Quarantine()
    die(court, evidence=DOUBTFUL)
    assert court.chance == 0
    die(court, evidence=CERTAIN)
    assert court.chance == 1


def test_suspects_that_ended_otherwise_are_forgotten_with_their_deaths() -> None:
    court, left, suspect = Quarantine(), stream(), stream()
    die(court, left)
    left.finish = Finish.ABORT
    assert not court.active
    die(court, suspect)
    assert repr(court) == "<Quarantine 1 deaths to explain, 0 by chance>"


def test_who_died_alone_most_is_tried_first_and_nobody_beside_others() -> None:
    plain, likely, unlikely, crashed = [stream() for _ in range(4)]
    unlikely.suspicion, likely.suspicion, crashed.suspicion = 2, 1, 2
    crashed.crashes = 0.5
    running = [plain, unlikely, likely, crashed]
    alone = [[crashed], [likely], [unlikely]]
    assert turns(running, [], 1, trial=True) == [*alone, [plain]]
    assert turns(running, [], 2, trial=True) == [[plain], *alone]
    assert turns(running, [], 1, trial=False) == [[plain]]
    assert turns(running, [flight(plain)], 1, trial=True) == []
    assert turns(running, [flight(plain)], 2, trial=True) == [[plain]]
    assert turns(running, [flight(likely)], 2, trial=True) == []
