"""The scheduler core, event by event: workers that join, answer, are silent, and leave."""

from math import inf

import pytest

from pagefleet.wire import (
    PROTOCOL,
    ChoiceState,
    Fence,
    GatewayBeat,
    GatewayHello,
    Join,
    Outputs,
    Pulse,
    Refused,
    Welcome,
    WorkerBeat,
    WorkerBye,
    WorkerHello,
    numerics_of,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.core import GATHERING, Lost, Unreachable
from tests.unit.scheduler.core_cell import Cell


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
    scheduler.figures.ordered(plans[0])
    assert sum(figures.steps) == len(plans)  # what was said does not change


def test_a_stream_stays_with_workers_that_compute_the_same_bits(cell: Cell) -> None:
    cell.settle()
    cell.join(b"one")
    cell.submit(max_tokens=4)
    cell.answer(cell.plans(b"one")[0], 50, peer=b"one")
    cell.join(b"other", numerics="another class")
    cell.join(b"two")
    cell.events(Lost(b"one"))
    assert [len(unpack_ints(plan.tokens)) for plan in cell.plans(b"two")[:1]] == [7]
    cell.events(Lost(b"two"))
    assert any(list(unpack_ints(plan.tokens))[-1] == 50 for plan in cell.plans(b"other"))


@pytest.mark.parametrize("order", [(b"one", b"other"), (b"other", b"one")], ids=str)
def test_a_scheduler_that_is_new_keeps_a_stream_in_its_class(
    cell: Cell, order: tuple[bytes, bytes]
) -> None:
    """Whichever worker greets it first: its gateway says what computed the tokens so far."""
    classes = {b"one": "class", b"other": "another class"}
    states = [ChoiceState(0, pack_ints([50]), numerics=numerics_of("class"))]
    cell.submit(states=states, attempt=2)
    for worker in order:
        cell.join(worker, numerics=classes[worker])
        cell.now += GATHERING / 3
    assert cell.plans(b"other") == []
    assert list(unpack_ints(cell.plans(b"one")[0].tokens))[-1] == 50
    assert cell.scheduler.placement.class_changes == 0


def test_what_is_to_come_again_is_computed_where_it_was(cell: Cell) -> None:
    """Of a stream that is resumed nobody but its reader may have a token any more."""
    cell.submit(states=[ChoiceState(0), ChoiceState(1, numerics=numerics_of("class"))])
    for worker, name in ((b"new", "a third class"), (b"other", "another class"), (b"one", "class")):
        cell.join(worker, numerics=name)
        cell.now += GATHERING / 4
    assert cell.plans(b"new") == cell.plans(b"other") == []
    assert [each.choices for plan in cell.plans(b"one") for each in plan.opens] == [[0, 1]]


def test_a_stream_waits_for_its_class_no_longer_than_workers_take_to_greet(cell: Cell) -> None:
    """And nobody waits behind it."""
    cell.join(b"other", numerics="another class")
    states = [ChoiceState(0, pack_ints([50]), numerics=numerics_of("class"))]
    cell.submit("old", states=states, attempt=2)
    cell.submit("new")
    assert [each.output for plan in cell.plans(b"other") for each in plan.opens] == [b""]
    cell.settle()
    cell.answer(cell.plans(b"other")[0], 60, peer=b"other")
    assert sum(len(plan.opens) for plan in cell.plans(b"other")) == 2
    assert cell.scheduler.placement.class_changes == 1


def test_outputs_tell_what_computed_them(cell: Cell) -> None:
    cell.settle()
    cell.join(b"one")
    cell.submit(max_tokens=2)
    cell.answer(cell.plans(b"one")[0], 50, peer=b"one")
    cell.join(b"other", numerics="another class")
    cell.events(Lost(b"one"))
    cell.answer(cell.plans(b"other")[0], 51, peer=b"other")
    items = [m.items[0] for _, m in cell.sent if isinstance(m, Outputs)]
    assert [item.numerics for item in items] == [numerics_of("class"), numerics_of("another class")]


def test_all_choices_stay_with_workers_that_compute_the_same_bits(cell: Cell) -> None:
    epoch = cell.join(b"one")
    cell.submit(max_tokens=4, choices=2)
    cell.answer(cell.plans(b"one")[0], 50, 51, peer=b"one")
    cell.join(b"other", numerics="another class")
    cell.join(b"two")
    cell.tell(b"one", WorkerBye(epoch))
    assert cell.plans(b"other") == []
    assert len(unpack_ints(cell.plans(b"two")[0].tokens)) == 14


def test_a_stream_leaves_its_class_when_no_worker_of_it_is_large_enough(cell: Cell) -> None:
    """Or it would wait at the head of the queue for ever, and everybody behind it."""
    cell.settle()
    cell.join(b"large")
    cell.submit(prompt=40, max_tokens=4)
    cell.answer(cell.plans(b"large")[0], 50, peer=b"large")
    cell.join(b"small", blocks=4)
    cell.join(b"other", numerics="another class")
    cell.events(Lost(b"large"))
    assert list(unpack_ints(cell.plans(b"other")[0].tokens))[-1] == 50
    cell.submit("next")
    assert len(cell.plans(b"small")) + len(cell.plans(b"other")) > 2


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


def test_another_protocol_or_model_is_refused(cell: Cell) -> None:
    assert isinstance(cell.tell(b"g", GatewayHello(PROTOCOL + 1))[0], Refused)
    cell.join()
    other = WorkerHello(PROTOCOL, "host", 1, 1, "other model", "class", 4, 9, 9, 9, 9, 9)
    assert isinstance(cell.tell(b"x", other)[0], Refused)


def test_a_gateway_of_another_model_is_refused_whether_it_comes_first_or_last(cell: Cell) -> None:
    beat = GatewayBeat([], fingerprint="other model")
    assert isinstance(cell.tell(b"g", GatewayHello(PROTOCOL, "other model"))[0], Welcome)
    assert isinstance(cell.tell(b"g", beat)[0], Pulse)
    cell.submit()
    cell.join()
    assert isinstance(cell.tell(b"g", beat)[0], Refused)
    assert not cell.scheduler.requests
    assert b"g" not in cell.scheduler.gateways
    assert isinstance(cell.tell(b"h", GatewayHello(PROTOCOL, "other model"))[0], Refused)
    assert isinstance(cell.tell(b"h", GatewayHello(PROTOCOL, "model"))[0], Welcome)
    assert isinstance(cell.tell(b"h", GatewayBeat([], fingerprint="model"))[0], Pulse)
