"""The scheduler core, event by event: life cycles of requests, gateways and workers."""

from dataclasses import dataclass, field
from math import inf

import pytest

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    Abort,
    ChoiceState,
    Credit,
    Fence,
    Finish,
    GatewayBeat,
    GatewayBye,
    GatewayHello,
    Join,
    Message,
    OpenRequest,
    Outputs,
    Plan,
    Pulse,
    Reason,
    Refused,
    Rejected,
    Result,
    RowError,
    Submit,
    TenantUse,
    ToScheduler,
    Welcome,
    WorkerBeat,
    WorkerBye,
    WorkerHello,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.core import Arrived, Event, Lost, Scheduler, Unreachable
from pagefleet_scheduler.placement import REFUSALS
from pagefleet_scheduler.queue import Room

EPOCH = 1 << 20


@dataclass
class Cell:
    """A scheduler, and what it has sent to whom."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(EPOCH, check=True))
    now: float = 100.0
    sent: list[tuple[bytes, Message]] = field(default_factory=list)

    def tell(self, peer: bytes, message: ToScheduler) -> list[Message]:
        return self.events(Arrived(peer, message))

    def events(self, *events: Event) -> list[Message]:
        sends = [(send.peer, send.message) for send in self.scheduler.handle(events, self.now)]
        self.sent += sends
        return [message for _, message in sends]

    def join(
        self, peer: bytes = b"w", blocks: int = 50, slots: int = 8, numerics: str = "class"
    ) -> int:
        hello = WorkerHello(
            PROTOCOL, "host", 1, 1, "model", numerics, 4, blocks, slots, 100, 64, 1000
        )
        join = next(m for m in self.tell(peer, hello) if isinstance(m, Join))
        return join.epoch

    def submit(
        self, request: str = "r", prompt: int = 6, choices: int = 1, **fields: object
    ) -> list[Message]:
        attempt = fields.pop("attempt", 0)
        states = fields.pop("states", [ChoiceState(index) for index in range(choices)])
        names = ("left", "window", "age", "continues")
        limits = {name: fields.pop(name) for name in names if name in fields}
        params = SamplingParams(**({"max_tokens": 3, "seed": 1} | fields))  # type: ignore[arg-type]
        ids = pack_ints(range(prompt))
        return self.tell(b"g", Submit(request, attempt, ids, params, states, **limits))  # type: ignore[arg-type]

    def plans(self, peer: bytes = b"w") -> list[Plan]:
        return [m for to, m in self.sent if to == peer and isinstance(m, Plan)]

    def answer(self, plan: Plan, *tokens: int, peer: bytes = b"w") -> list[Message]:
        return self.tell(peer, Result(plan.epoch, plan.step, pack_ints(tokens)))

    def outputs(self) -> list[tuple[int, int, list[int], Finish | None]]:
        """(choice, position, tokens, finish) of all outputs so far."""
        return [
            (item.choice, item.position, list(unpack_ints(item.tokens)), item.finish)
            for _, message in self.sent
            if isinstance(message, Outputs)
            for item in message.items
        ]


@pytest.fixture
def cell() -> Cell:
    return Cell()


def test_a_request_from_submit_to_its_end(cell: Cell) -> None:
    assert cell.tell(b"g", GatewayHello(PROTOCOL)) == [Welcome(EPOCH, PROTOCOL)]
    cell.join()
    cell.submit()
    first, second = cell.plans()
    cell.answer(first, 50)
    assert cell.outputs() == [(0, 0, [50], None)]
    cell.answer(second, 51)
    cell.answer(cell.plans()[2], 52)
    assert cell.outputs()[1:] == [(0, 1, [51], None), (0, 2, [52], Finish.LENGTH)]
    assert not cell.scheduler.requests
    assert len(cell.plans()) == 3


def test_who_comes_during_a_step_is_in_the_next(cell: Cell) -> None:
    """Once it is known how long steps take, the next is ordered just before it is needed."""
    cell.join()
    cell.submit("early", max_tokens=50)
    for step in range(3):
        cell.now += 0.1
        cell.answer(cell.plans()[step], 50)
    assert len(cell.plans()) == 4
    assert cell.now < cell.scheduler.due < cell.now + 0.1
    due = cell.scheduler.due
    cell.now += 0.05
    cell.submit("late", prompt=3)
    assert len(cell.plans()) == 4
    assert cell.scheduler.due == due
    cell.now = due
    cell.events()
    assert len(unpack_ints(cell.plans()[4].tokens)) == 1 + 3
    assert cell.scheduler.due == inf


def test_a_stop_token_is_the_last_and_what_was_ordered_after_it_is_ignored(cell: Cell) -> None:
    cell.join()
    cell.submit(eos_token_ids=(7,))
    first, second = cell.plans()
    cell.answer(first, 7)
    cell.answer(second, 51)
    assert cell.outputs() == [(0, 0, [7], Finish.STOP)]


def test_min_tokens_holds_a_stop_token_back(cell: Cell) -> None:
    cell.join()
    cell.submit(eos_token_ids=(7,), min_tokens=2)
    cell.answer(cell.plans()[0], 7)
    cell.answer(cell.plans()[1], 7)
    assert cell.outputs() == [(0, 0, [7], None), (0, 1, [7], Finish.STOP)]


def test_requests_wait_for_a_worker_but_not_for_ever(cell: Cell) -> None:
    assert cell.submit() == []
    cell.now += 1
    cell.tell(b"g", GatewayHello(PROTOCOL))
    cell.join()
    assert len(cell.plans()) == 2
    other = Cell()
    other.submit()
    for _ in range(80):
        other.now += 0.4
        other.tell(b"g", GatewayHello(PROTOCOL))
        rejected = [m for _, m in other.sent if isinstance(m, Rejected)]
        assert not rejected or other.now > 129.9
    assert [m.reason for m in rejected] == [Reason.NO_WORKER]
    assert not other.scheduler.requests


def test_an_old_stream_gives_a_new_scheduler_s_workers_time_to_join(cell: Cell) -> None:
    states = [ChoiceState(0, pack_ints([50, 51]))]
    assert cell.submit(states=states, attempt=2, age=300.0) == []
    cell.now += 1.9
    assert not [m for m in cell.tell(b"g", GatewayHello(PROTOCOL)) if isinstance(m, Rejected)]
    cell.join()
    assert list(unpack_ints(cell.plans()[0].tokens))[-2:] == [50, 51]


def test_what_is_handed_in_again_waits_for_a_worker_that_can_hold_it(cell: Cell) -> None:
    """The scheduler is new, and the smaller worker was the first to join."""
    cell.join(b"small", blocks=4)
    assert cell.submit(prompt=40, attempt=2, age=300.0) == []
    cell.now += 1.9
    cell.tell(b"g", GatewayHello(PROTOCOL))
    cell.join(b"large")
    assert len(cell.plans(b"large")) == 2


def test_the_wait_for_a_worker_begins_when_the_last_one_is_lost() -> None:
    cell = Cell(Scheduler(EPOCH, check=True, worker_wait=1.0))
    epoch = cell.join()
    for _ in range(5):
        cell.now += 0.4
        cell.tell(b"w", WorkerBeat(epoch, int(cell.now * 10), True))
    cell.submit(age=300.0)
    cell.events(Lost(b"w"))
    for tick in range(8):
        cell.now += 0.4
        cell.tell(b"g", GatewayHello(PROTOCOL))
        assert cell.scheduler.requests or tick > 1
    assert not cell.scheduler.requests


def test_many_that_fit_nowhere_keep_nobody_waiting(cell: Cell) -> None:
    cell.join(blocks=4)
    for number in range(REFUSALS):
        cell.submit(f"large{number}", prompt=40, attempt=2)
    cell.submit("small")
    assert len(cell.plans()) == 2


def test_what_can_never_fit_is_refused_at_once(cell: Cell) -> None:
    cell.join(blocks=4)
    (rejected,) = cell.submit(prompt=10, max_tokens=8)
    assert isinstance(rejected, Rejected)
    assert (rejected.reason, rejected.param) == (Reason.TOO_LONG, "max_tokens")
    assert "16" in rejected.text
    assert not cell.scheduler.requests


def test_what_no_worker_can_hold_keeps_nobody_waiting(cell: Cell) -> None:
    cell.submit("long", prompt=40)
    cell.submit("short", prompt=6)
    epoch = cell.join(blocks=4)
    assert len(unpack_ints(cell.plans()[0].tokens)) == 6
    for _ in range(160):
        cell.now += 0.2
        cell.tell(b"w", WorkerBeat(epoch, int(cell.now * 10), True))
        cell.tell(b"g", GatewayHello(PROTOCOL))
    rejected = [m for _, m in cell.sent if isinstance(m, Rejected)]
    assert [(m.request, m.reason) for m in rejected] == [("long", Reason.TOO_LONG)]


def test_the_queue_is_bounded() -> None:
    cell = Cell(Scheduler(EPOCH, check=True, room=Room(2)))
    for number in range(2):
        assert cell.submit(f"r{number}") == []
    (rejected,) = cell.submit("r2")
    assert isinstance(rejected, Rejected)
    assert rejected.reason == Reason.OVERLOADED


def test_abort_frees_every_block_at_once(cell: Cell) -> None:
    cell.join()
    cell.submit(choices=3, max_tokens=9)
    cell.answer(cell.plans()[0], 50, 51, 52)
    planner = cell.scheduler.placement.planners[0]
    assert planner.cache.pool.held > 2
    cell.tell(b"g", Abort("r", 0, [1]))
    assert len(planner.running) == 2
    cell.tell(b"g", Abort("r", 0))
    assert (planner.cache.pool.held, planner.running) == (0, [])


@pytest.mark.parametrize("gone", [0, 1])
def test_choices_aborted_before_their_first_token(cell: Cell, gone: int) -> None:
    cell.join()
    cell.submit(choices=3)
    cell.tell(b"g", Abort("r", 0, [gone]))
    cell.answer(cell.plans()[0], 50, 51, 52)
    assert [(choice, tokens) for choice, _, tokens, _ in cell.outputs()] == [
        (1 - gone, [51 - gone]),
        (2, [52]),
    ]
    cell.tell(b"g", Abort("r", 0, [1 - gone, 2]))
    assert not cell.scheduler.requests


def test_all_choices_aborted_while_their_prompt_is_computed(cell: Cell) -> None:
    cell.join()
    cell.submit(choices=2)
    cell.tell(b"g", Abort("r", 0, [1]))
    cell.tell(b"g", Abort("r", 0, [0]))
    planner = cell.scheduler.placement.planners[0]
    assert planner.cache.pool.held == 0
    cell.answer(cell.plans()[0], 50, 51)
    assert cell.outputs() == []


def test_a_lost_worker_s_sequences_go_on_elsewhere(cell: Cell) -> None:
    cell.join(b"one")
    cell.submit(max_tokens=4)
    cell.answer(cell.plans(b"one")[0], 50, peer=b"one")
    cell.join(b"two")
    cell.events(Lost(b"one"))
    again = cell.plans(b"two")[0]
    assert list(unpack_ints(again.tokens)) == [0, 1, 2, 3, 4, 5, 50]
    stale = cell.plans(b"one")[1]
    assert cell.answer(stale, 99, peer=b"one") == []
    cell.now += 1.5
    cell.answer(again, 51, peer=b"two")
    assert cell.outputs() == [(0, 0, [50], None), (0, 1, [51], None)]
    scheduler = cell.scheduler
    figures = scheduler.figures.stats(scheduler.placement, scheduler.admission, joins=2)
    assert (figures.dropped_results, figures.lost_workers, figures.migrations) == (1, 1, 1)
    assert (figures.recoveries, figures.recovery_micros) == (1, 1_500_000)
    plans = cell.plans(b"one") + cell.plans(b"two")
    assert figures.step_tokens == sum(len(plan.tokens) // 4 for plan in plans)
    assert sum(figures.steps) == len(plans)


def test_a_stream_stays_with_workers_that_compute_the_same_bits(cell: Cell) -> None:
    cell.join(b"one")
    cell.submit(max_tokens=4)
    cell.answer(cell.plans(b"one")[0], 50, peer=b"one")
    cell.join(b"other", numerics="another class")
    cell.join(b"two")
    cell.events(Lost(b"one"))
    assert [len(unpack_ints(plan.tokens)) for plan in cell.plans(b"two")[:1]] == [7]
    cell.events(Lost(b"two"))
    assert any(list(unpack_ints(plan.tokens))[-1] == 50 for plan in cell.plans(b"other"))


def test_all_choices_stay_with_workers_that_compute_the_same_bits(cell: Cell) -> None:
    epoch = cell.join(b"one")
    cell.submit(max_tokens=4, choices=2)
    cell.answer(cell.plans(b"one")[0], 50, 51, peer=b"one")
    cell.join(b"other", numerics="another class")
    cell.join(b"two")
    cell.tell(b"one", WorkerBye(epoch))
    assert cell.plans(b"other") == []
    assert len(unpack_ints(cell.plans(b"two")[0].tokens)) == 14


def test_each_choice_pauses_at_its_own_credit(cell: Cell) -> None:
    cell.join()
    cell.submit(max_tokens=9, window=1, choices=2)
    cell.answer(cell.plans()[0], 50, 51)
    assert len(cell.plans()) == 1
    cell.tell(b"g", Credit("r", 0, {1: 2}))
    cell.answer(cell.plans()[1], 61)
    assert cell.outputs()[2:] == [(1, 1, [61], None)]


def test_what_a_prompt_found_is_said_of_every_choice(cell: Cell) -> None:
    cell.join()
    cell.submit("first", max_tokens=1)
    cell.answer(cell.plans()[0], 50)
    cell.submit("second", max_tokens=1, choices=2)
    cell.answer(cell.plans()[1], 50, 51)
    outputs = [m for _, m in cell.sent if isinstance(m, Outputs)]
    assert [(item.choice, item.cached) for item in outputs[-1].items] == [(0, 4), (1, 4)]


def test_who_lost_its_blocks_is_let_in_when_its_last_step_is_back(cell: Cell) -> None:
    """Its next input may be what that step samples, in a slot that is another's by now."""
    cell.join()
    cell.submit(max_tokens=9)
    first, second = cell.plans()
    placement = cell.scheduler.placement
    (planner,) = placement.planners
    for lost in planner.preempt(planner.running[0]):
        placement.waiting.add(lost)
    cell.answer(first, 50)
    assert planner.running == []
    cell.answer(second, 51)
    assert list(unpack_ints(cell.plans()[2].tokens)) == [0, 1, 2, 3, 4, 5, 50, 51]


def test_a_stream_leaves_its_class_when_no_worker_of_it_is_large_enough(cell: Cell) -> None:
    """Or it would wait at the head of the queue for ever, and everybody behind it."""
    cell.join(b"large")
    cell.submit(prompt=40, max_tokens=4)
    cell.answer(cell.plans(b"large")[0], 50, peer=b"large")
    cell.join(b"small", blocks=4)
    cell.join(b"other", numerics="another class")
    cell.events(Lost(b"large"))
    assert list(unpack_ints(cell.plans(b"other")[0].tokens))[-1] == 50
    cell.submit("next")
    assert len(cell.plans(b"small")) + len(cell.plans(b"other")) > 2


def test_who_waits_for_one_worker_keeps_nobody_from_another(cell: Cell) -> None:
    cell.join(b"large", slots=1)
    cell.submit("runs", prompt=40)
    cell.join(b"small", blocks=4)
    cell.submit("too large for the small one", prompt=30)
    cell.submit("small")
    assert len(cell.plans(b"small")) == 2
    cell.submit("medium", prompt=20)
    assert len(cell.plans(b"small")) == 2


def test_its_own_absence_is_not_the_silence_of_others(cell: Cell) -> None:
    epoch = cell.join()
    cell.submit()
    cell.answer(cell.plans()[0], 50)
    cell.now += 60
    assert cell.events() == []
    assert cell.tell(b"w", WorkerBeat(epoch, 1, False)) == []
    cell.now += 0.4
    assert cell.events() == []
    cell.answer(cell.plans()[1], 51)
    assert cell.outputs() == [(0, 0, [50], None), (0, 1, [51], None)]
    assert [plan.step for plan in cell.plans()] == [0, 1, 2]


def test_who_cannot_be_reached_is_not_lost_and_hears_all_again(cell: Cell) -> None:
    epoch = cell.join()
    cell.submit()
    plans = cell.plans()
    assert cell.events(Unreachable(b"w"), Unreachable(b"g")) == []
    assert cell.tell(b"w", WorkerBeat(epoch, 0, False)) == [Join(epoch), *plans]
    assert cell.tell(b"w", WorkerBeat(epoch, 0, False)) == []


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_the_last_worker_leaves_and_comes_back(cell: Cell, says_goodbye: bool) -> None:
    old = cell.join()
    cell.submit()
    cell.answer(cell.plans()[0], 50)
    if says_goodbye:
        cell.tell(b"w", WorkerBye(old))
    else:
        for _ in range(6):
            cell.now += 0.4
            cell.tell(b"g", GatewayHello(PROTOCOL))
    assert cell.tell(b"w", WorkerBeat(old, 1, False))[0] == Fence(
        "You are not, or no longer, of this cell."
    )
    cell.now += 1
    new = cell.join()
    assert new > old
    again = next(plan for plan in cell.plans() if plan.epoch == new)
    assert list(unpack_ints(again.tokens))[-1] == 50


def test_a_worker_that_says_hello_twice_before_it_hears_an_answer(cell: Cell) -> None:
    cell.submit()
    first = cell.join()
    orders = cell.plans()
    assert cell.join() == first
    assert cell.plans() == orders * 2
    cell.tell(b"w", WorkerBeat(first, 0, False))
    second = cell.join()
    assert second != first
    assert cell.tell(b"w", WorkerBeat(first, 0, True))[0] == Join(second)
    cell.tell(b"w", WorkerBeat(second, 0, False))
    assert cell.tell(b"w", WorkerBeat(first, 0, True)) == []
    assert cell.tell(b"w", WorkerBye(first)) == []
    assert cell.scheduler.placement.running == 1


def test_a_result_that_overtakes_another_waits_for_it(cell: Cell) -> None:
    cell.join()
    cell.submit()
    first, second = cell.plans()
    cell.answer(second, 51)
    assert cell.outputs() == []
    cell.answer(first, 50)
    assert cell.outputs() == [(0, 0, [50], None), (0, 1, [51], None)]
    for again in (first, second):
        assert cell.answer(again, 99) == []
    assert cell.scheduler.figures.dropped_results == 2


def test_what_a_gateway_no_longer_has_open_is_dropped(cell: Cell) -> None:
    cell.join()
    cell.submit("left")
    cell.submit("open")
    cell.tell(b"g", GatewayBeat([OpenRequest("open", 0, {0: 0})]))
    assert [request.id for request in cell.scheduler.requests] == ["open"]


def test_a_busy_worker_without_progress_is_fenced(cell: Cell) -> None:
    epoch = cell.join()
    cell.submit()
    for _ in range(15):
        cell.now += 0.2
        cell.tell(b"w", WorkerBeat(epoch, 5, True))
        cell.tell(b"g", GatewayHello(PROTOCOL))
    assert any(isinstance(message, Fence) for _, message in cell.sent)


def test_a_slow_worker_with_progress_is_not_fenced(cell: Cell) -> None:
    epoch = cell.join()
    cell.submit()
    for count in range(30):
        cell.now += 0.2
        cell.tell(b"w", WorkerBeat(epoch, count, True))
        cell.tell(b"g", GatewayHello(PROTOCOL))
    assert not any(isinstance(message, Fence) for _, message in cell.sent)


def test_a_plan_that_an_idle_worker_does_not_answer_comes_again_once(cell: Cell) -> None:
    epoch = cell.join()
    cell.submit()
    for _ in range(7):
        cell.now += 0.2
        cell.tell(b"w", WorkerBeat(epoch, 0, False))
    first, second, *again = cell.plans()
    assert again == [first, second]
    for _ in range(7):
        cell.now += 0.2
        cell.tell(b"w", WorkerBeat(epoch, 0, False))
    assert any(isinstance(message, Fence) for _, message in cell.sent)


def test_a_result_that_does_not_fit_fences(cell: Cell) -> None:
    cell.join()
    cell.submit()
    assert isinstance(cell.answer(cell.plans()[0], 50, 51)[0], Fence)
    assert cell.outputs() == []


def test_a_repeated_result_is_dropped(cell: Cell) -> None:
    cell.join()
    cell.submit()
    plan = cell.plans()[0]
    cell.answer(plan, 50)
    assert cell.answer(plan, 50) == []
    assert cell.outputs() == [(0, 0, [50], None)]


def test_a_failed_row_ends_its_request_and_no_other(cell: Cell) -> None:
    cell.join()
    cell.submit("bad")
    cell.submit("good")
    plan = cell.plans()[0]
    cell.tell(b"w", Result(plan.epoch, plan.step, pack_ints([50]), errors=[RowError(0, "NaN")]))
    rejected = [m for _, m in cell.sent if isinstance(m, Rejected)]
    assert [(m.request, m.reason, m.text) for m in rejected] == [("bad", Reason.FAILED, "NaN")]
    assert [request.id for request in cell.scheduler.requests] == ["good"]


def test_a_request_of_which_two_rows_fail_is_refused_once(cell: Cell) -> None:
    cell.join()
    cell.submit(choices=2)
    cell.answer(cell.plans()[0], 50, 51)
    plan = cell.plans()[1]
    errors = [RowError(0, "NaN"), RowError(1, "NaN")]
    sent = cell.tell(b"w", Result(plan.epoch, plan.step, pack_ints([52, 53]), errors=errors))
    assert len([message for message in sent if isinstance(message, Rejected)]) == 1


def test_a_row_that_its_own_masks_leave_without_a_token_is_its_clients_fault(cell: Cell) -> None:
    cell.join()
    cell.submit("masked", allowed_token_ids=(5,), bad_words=((5,),))
    plan = cell.plans()[0]
    error = RowError(0, "no token is left")
    cell.tell(b"w", Result(plan.epoch, plan.step, pack_ints([-1]), errors=[error]))
    (rejected,) = [m for _, m in cell.sent if isinstance(m, Rejected)]
    assert (rejected.reason, rejected.text) == (Reason.INVALID, "no token is left")


def test_a_beat_that_shows_a_gap_is_sent_what_is_missing(cell: Cell) -> None:
    cell.join()
    cell.submit(max_tokens=5)
    cell.answer(cell.plans()[0], 50)
    cell.answer(cell.plans()[1], 51)
    lost = GatewayBeat([OpenRequest("r", 0, {0: 1})])
    cell.sent.clear()
    cell.tell(b"g", lost)
    assert cell.outputs() == []
    cell.tell(b"g", lost)
    assert cell.outputs() == [(0, 1, [51], None)]


def test_the_end_of_a_choice_is_sent_again_while_others_go_on(cell: Cell) -> None:
    cell.join()
    cell.submit(choices=2, eos_token_ids=(7,), max_tokens=9)
    cell.answer(cell.plans()[0], 7, 50)
    assert (0, 0, [7], Finish.STOP) in cell.outputs()
    lost = GatewayBeat([OpenRequest("r", 0, {0: 0, 1: 1})])
    cell.tell(b"g", lost)
    cell.sent.clear()
    cell.tell(b"g", lost)
    assert (0, 0, [7], Finish.STOP) in cell.outputs()


def test_an_end_without_a_token_is_sent_again(cell: Cell) -> None:
    cell.join()
    states = [ChoiceState(0, pack_ints([50, 7])), ChoiceState(1, pack_ints([51]))]
    cell.submit(states=states, attempt=2, eos_token_ids=(7,), max_tokens=9)
    assert cell.outputs() == [(0, 2, [], Finish.STOP)]
    lost = GatewayBeat([OpenRequest("r", 2, {0: 2, 1: 1})])
    cell.tell(b"g", lost)
    assert cell.outputs() == [(0, 2, [], Finish.STOP)] * 2


def test_what_is_known_under_another_attempt_has_to_be_submitted(cell: Cell) -> None:
    cell.submit(attempt=1)
    pulse = cell.tell(b"g", GatewayBeat([OpenRequest("r", 2, {0: 0})]))[-1]
    assert isinstance(pulse, Pulse)
    assert pulse.unknown == ["r"]


def test_a_new_scheduler_says_what_it_does_not_know(cell: Cell) -> None:
    line = OpenRequest("r", 0, {0: 1})
    (pulse,) = cell.tell(b"g", GatewayBeat([line]))
    assert isinstance(pulse, Pulse)
    assert (pulse.epoch, pulse.unknown) == (EPOCH, ["r"])


def test_a_resubmitted_request_goes_on_where_it_was(cell: Cell) -> None:
    cell.join()
    states = [
        ChoiceState(0, pack_ints([50, 51])),
        ChoiceState(1, pack_ints([60]), finished=True),
        ChoiceState(2),
    ]
    cell.submit(states=states, attempt=3, max_tokens=4)
    tokens = list(unpack_ints(cell.plans()[0].tokens))
    assert tokens == [0, 1, 2, 3, 4, 5, 50, 51, 0, 1, 2, 3, 4, 5]
    cell.answer(cell.plans()[0], 52, 70)
    assert cell.outputs() == [(0, 2, [52], None), (2, 0, [70], None)]


def test_a_resubmitted_choice_whose_end_was_lost_ends(cell: Cell) -> None:
    cell.join()
    cell.submit(states=[ChoiceState(0, pack_ints([50, 51, 52]))])
    assert cell.outputs() == [(0, 3, [], Finish.LENGTH)]
    assert not cell.scheduler.requests


def test_an_older_attempt_is_void(cell: Cell) -> None:
    cell.join()
    cell.submit(attempt=1)
    cell.submit(attempt=0)
    cell.submit(attempt=1)
    assert len(cell.plans()) == 2
    cell.answer(cell.plans()[0], 50)
    assert cell.outputs() == [(0, 0, [50], None)]
    cell.tell(b"g", Abort("r", 0))
    assert [request.id for request in cell.scheduler.requests] == ["r"]
    cell.submit(attempt=2)
    assert [request.attempt for request in cell.scheduler.requests] == [2]


@pytest.mark.parametrize("how", ["bye", "silence", "lost"])
def test_a_gateway_that_goes_takes_its_requests_with_it(cell: Cell, how: str) -> None:
    epoch = cell.join()
    cell.submit(max_tokens=50)
    if how == "bye":
        cell.tell(b"g", GatewayBye())
    elif how == "lost":
        cell.events(Lost(b"g"))
    else:
        for _ in range(12):
            cell.now += 0.2
            cell.tell(b"w", WorkerBeat(epoch, int(cell.now * 10), True))
    assert not cell.scheduler.requests
    planner = cell.scheduler.placement.planners[0]
    assert planner.cache.pool.held == 0


@pytest.mark.parametrize("choices", [1, 2])
def test_a_deadline_ends_a_request_wherever_it_is(cell: Cell, choices: int) -> None:
    epoch = cell.join(slots=choices)
    cell.submit("runs", choices=choices, max_tokens=50, left=1.0)
    cell.submit("waits", left=1.0)
    cell.submit("searches", beam_width=1, left=1.0)
    cell.answer(cell.plans()[0], *range(50, 50 + choices))
    cell.now += 1.1
    cell.tell(b"w", WorkerBeat(epoch, 9, True))
    finished = [output for output in cell.outputs() if output[3] is not None]
    assert finished == [
        *((choice, 1, [], Finish.TIMEOUT) for choice in range(choices)),
        (0, 0, [], Finish.TIMEOUT),
        (0, 0, [], Finish.TIMEOUT),
    ]
    assert not cell.scheduler.requests


def test_a_stream_that_moved_and_is_submitted_again_goes_on(cell: Cell) -> None:
    cell.join()
    cell.submit("old", max_tokens=9, window=9)
    cell.submit("new", max_tokens=9, window=9, continues="old", attempt=1)
    assert [request.id for request in cell.scheduler.requests] == ["new"]
    cell.submit("new", max_tokens=9, window=9, continues="old", attempt=2)
    cell.answer(cell.plans()[0], 50)
    cell.answer(cell.plans()[1], 51)
    cell.answer(cell.plans()[2], 60)
    assert cell.outputs() == [(0, 0, [60], None)]


def test_what_a_lost_gateway_had_open_is_open_nowhere(cell: Cell) -> None:
    cell.tell(b"other", GatewayBeat([], {"tenant": TenantUse(1, 10, 3)}))
    for expected in (3, 0):
        pulse = cell.tell(b"g", GatewayBeat([], {}))[-1]
        assert isinstance(pulse, Pulse)
        assert sum(use.open for use in pulse.elsewhere.values()) == expected
        cell.events(Lost(b"other"))


def test_a_later_attempt_has_its_own_deadline(cell: Cell) -> None:
    epoch = cell.join()
    cell.submit(attempt=1, max_tokens=50, left=1.0)
    cell.submit(attempt=2, max_tokens=50, left=2.0)
    for expected in (1, 0):
        cell.now += 1.1
        cell.tell(b"w", WorkerBeat(epoch, int(cell.now * 10), True))
        assert len(cell.scheduler.requests) == expected


def test_a_credit_that_was_overtaken_takes_nothing_back(cell: Cell) -> None:
    cell.join()
    cell.submit(max_tokens=9, window=1)
    cell.tell(b"g", Credit("r", 0, {0: 3}))
    cell.tell(b"g", Credit("r", 0, {0: 2}))
    for number, token in enumerate((50, 51, 52)):
        cell.answer(cell.plans()[number], token)
    assert [tokens for _, _, tokens, _ in cell.outputs()] == [[50], [51], [52]]


def test_a_choice_pauses_when_its_credit_is_used(cell: Cell) -> None:
    epoch = cell.join()
    cell.submit(max_tokens=9, window=2)
    cell.answer(cell.plans()[0], 50)
    cell.answer(cell.plans()[1], 51)
    assert len(cell.plans()) == 2
    for _ in range(8):
        cell.now += 0.4
        cell.tell(b"w", WorkerBeat(epoch, 0, False))
        pulse = cell.tell(b"g", GatewayBeat([OpenRequest("r", 0, {0: 2})]))[-1]
        assert isinstance(pulse, Pulse)
        assert not pulse.stalled
    cell.tell(b"g", Credit("r", 0, {0: 4}))
    cell.answer(cell.plans()[2], 52)
    cell.answer(cell.plans()[3], 53)
    assert len(cell.plans()) == 4
    assert [tokens for _, _, tokens, _ in cell.outputs()] == [[50], [51], [52], [53]]


def test_a_paused_choice_gives_up_what_it_holds_when_anyone_waits(cell: Cell) -> None:
    cell.join(slots=1)
    cell.submit("slow", max_tokens=9, window=1)
    cell.answer(cell.plans()[0], 50)
    cell.submit("next", max_tokens=1)
    cell.answer(cell.plans()[1], 60)
    cell.tell(b"g", Credit("slow", 0, {0: 3}))
    assert list(unpack_ints(cell.plans()[2].tokens))[-1] == 50


def test_prompts_without_an_answer_to_give(cell: Cell) -> None:
    cell.join()
    cell.submit(max_tokens=0, choices=2)
    cell.answer(cell.plans()[0])
    assert cell.outputs() == [(0, 0, [], Finish.LENGTH), (1, 0, [], Finish.LENGTH)]


def test_another_protocol_or_model_is_refused(cell: Cell) -> None:
    assert isinstance(cell.tell(b"g", GatewayHello(PROTOCOL + 1))[0], Refused)
    cell.join()
    other = WorkerHello(PROTOCOL, "host", 1, 1, "other model", "class", 4, 9, 9, 9, 9, 9)
    assert isinstance(cell.tell(b"x", other)[0], Refused)


def test_work_goes_where_the_least_is_to_do_after_prefix_hits(cell: Cell) -> None:
    cell.join(b"one")
    cell.submit("a", prompt=40, max_tokens=1)
    cell.answer(cell.plans(b"one")[0], 50, peer=b"one")
    cell.join(b"two")
    cell.submit("b", prompt=40, max_tokens=9)
    assert len(cell.plans(b"two")) == 0
    first = [m for to, m in cell.sent if to == b"g" and isinstance(m, Outputs)]
    assert first
    cell.tell(
        b"g",
        Submit("c", 0, pack_ints([9] * 40), SamplingParams(max_tokens=9, seed=1), [ChoiceState(0)]),
    )
    assert len(cell.plans(b"two")) == 2
