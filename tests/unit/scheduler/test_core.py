"""The scheduler core, event by event: life cycles of requests."""

import pytest

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    Abort,
    ChoiceState,
    Credit,
    Finish,
    GatewayBeat,
    GatewayHello,
    OpenRequest,
    Outputs,
    Pulse,
    Reason,
    Rejected,
    Result,
    RowError,
    Submit,
    Welcome,
    WorkerBeat,
    numerics_of,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.core import Lost, Scheduler
from pagefleet_scheduler.queue import Room
from tests.unit.scheduler.core_cell import EPOCH, Cell


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
    for number in range(100):
        cell.submit(f"large{number}", prompt=40, attempt=2)
    cell.submit("small")
    assert len(cell.plans()) == 2


def test_however_many_wait_for_one_worker_another_has_its_share(cell: Cell) -> None:
    """Streams wait for the worker that computes their bits, while another could take a request."""
    cell.join(b"one", numerics="one", slots=1)
    cell.join(b"two", numerics="two", slots=1)
    cell.settle()
    state = ChoiceState(0, pack_ints([50]), numerics=numerics_of("one"))
    for number in range(100):
        cell.submit(f"stream{number}", max_tokens=9, attempt=2, states=[state])
    assert not cell.plans(b"two")
    cell.submit("new")
    assert len(cell.plans(b"two")) == 2


@pytest.mark.parametrize(
    ("prompt", "tokens", "param"), [(10, 8, "max_tokens"), (17, 1, "max_tokens"), (17, 0, None)]
)
def test_what_can_never_fit_is_refused_at_once(
    prompt: int, tokens: int, param: str | None, cell: Cell
) -> None:
    """Where no token is asked for it is not their number's fault."""
    cell.join(blocks=4)
    cell.settle()
    (rejected,) = cell.submit(prompt=prompt, max_tokens=tokens)
    assert isinstance(rejected, Rejected)
    assert (rejected.reason, rejected.param) == (Reason.TOO_LONG, param)
    assert "16" in rejected.text
    assert not cell.scheduler.requests


@pytest.mark.parametrize("blocks", [4, 40])
def test_nothing_is_too_long_before_all_workers_can_have_been_heard(
    blocks: int, cell: Cell
) -> None:
    """Those of the scheduler before this one say hello one after another."""
    cell.join(b"small", blocks=4)
    cell.submit("long", prompt=17)
    assert isinstance(welcome := cell.tell(b"g", GatewayHello(PROTOCOL))[0], Welcome)
    assert welcome.max_model_len == 0
    cell.join(b"other", blocks=blocks)
    cell.settle()
    rejected = [m.request for _, m in cell.sent if isinstance(m, Rejected)]
    assert rejected == (["long"] if blocks == 4 else [])
    assert bool(cell.plans(b"other")) == (blocks > 4)
    assert isinstance(welcome := cell.tell(b"g", GatewayHello(PROTOCOL))[-1], Welcome)
    assert welcome.max_model_len == min(4 * blocks, 100)


def test_a_prompt_without_tokens_is_refused(cell: Cell) -> None:
    (rejected,) = cell.submit(prompt=0)
    assert isinstance(rejected, Rejected)
    assert (rejected.reason, rejected.param) == (Reason.INVALID, "prompt")
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
    (planner,) = cell.scheduler.placement.planners
    planner.preempt(planner.running[0])
    cell.answer(first, 50)
    assert planner.running == []
    cell.answer(second, 51)
    assert list(unpack_ints(cell.plans()[2].tokens)) == [0, 1, 2, 3, 4, 5, 50, 51]


def test_who_waits_for_one_worker_keeps_nobody_from_another(cell: Cell) -> None:
    cell.join(b"large", slots=1)
    cell.submit("runs", prompt=40)
    cell.join(b"small", blocks=4)
    cell.submit("too large for the small one", prompt=30)
    cell.submit("small")
    assert len(cell.plans(b"small")) == 2
    cell.submit("medium", prompt=20)
    assert len(cell.plans(b"small")) == 2


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


def test_a_later_attempt_has_its_own_deadline(cell: Cell) -> None:
    epoch = cell.join()
    cell.submit(attempt=1, max_tokens=50, left=1.0)
    cell.submit(attempt=2, max_tokens=50, left=2.0)
    for expected in (1, 0):
        cell.now += 1.1
        cell.tell(b"w", WorkerBeat(epoch, int(cell.now * 10), True))
        assert len(cell.scheduler.requests) == expected


def test_deadlines_of_requests_that_have_ended_do_not_pile_up(cell: Cell) -> None:
    epoch = cell.join()
    cell.submit("stays", max_tokens=50, left=60.0)
    for number in range(3000):
        cell.submit(f"r{number}", max_tokens=50, left=3600.0)
        cell.tell(b"g", Abort(f"r{number}", 0))
    assert len(cell.scheduler.admission._deadlines) < 1100
    cell.now += 61
    cell.tell(b"w", WorkerBeat(epoch, 9, True))
    assert not cell.scheduler.requests


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


@pytest.mark.parametrize("beams", [0, 2])
def test_prompts_without_an_answer_to_give(cell: Cell, beams: int) -> None:
    """Their choices are ended by their own numbers, of a beam search too."""
    cell.join()
    states = [ChoiceState(2), ChoiceState(3)]
    cell.submit(max_tokens=0, states=states, beam_width=beams)
    cell.answer(cell.plans()[0])
    assert cell.outputs() == [(2, 0, [], Finish.LENGTH), (3, 0, [], Finish.LENGTH)]
    assert not cell.scheduler.requests


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
