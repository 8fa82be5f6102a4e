"""The scheduler core, event by event: gateways that miss something, come back, and leave."""

import pytest

from pagefleet.wire import (
    Abort,
    ChoiceState,
    Finish,
    GatewayBeat,
    GatewayBye,
    OpenRequest,
    Pulse,
    TenantUse,
    WorkerBeat,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.core import Lost
from tests.unit.scheduler.core_cell import EPOCH, Cell


def test_what_a_gateway_no_longer_has_open_is_dropped(cell: Cell) -> None:
    cell.join()
    cell.submit("left")
    cell.submit("open")
    cell.tell(b"g", GatewayBeat([OpenRequest("open", 0, {0: 0})]))
    assert [request.id for request in cell.scheduler.requests] == ["open"]


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


def test_a_gateway_that_was_silent_is_not_told_of_its_own_use(cell: Cell) -> None:
    for used in ({}, {"t": TenantUse(9, 900, 1)}):
        cell.tell(b"g", GatewayBeat([], used))
    cell.settle()
    cell.settle()
    assert len(cell.scheduler.gateways) == 0
    sent = cell.tell(b"g", GatewayBeat([], {"t": TenantUse(9, 900, 1)}))
    (pulse,) = [message for message in sent if isinstance(message, Pulse)]
    assert pulse.elsewhere == {"t": TenantUse(0, 0, 0)}
