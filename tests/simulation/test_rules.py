"""What a cell promises besides exact streams: deadlines, bounds, classes of numerics."""

import random
from dataclasses import replace

import msgspec
import pytest

from pagefleet.wire import Finish, Submit, pack_ints
from pagefleet_scheduler.queue import Room
from tests.simulation.cell import Cell, Wish
from tests.simulation.clients import FORMS, LONGEST, Client, make_submit
from tests.simulation.faults import Fault, Interrupt, Kill, Leave, Mangle, Stick, Stop, Terminate
from tests.simulation.network import SCHEDULER, Mangling, Moment
from tests.simulation.parties import SchedulerProcess
from tests.simulation.test_matrix import calm, run


def ends(client: Client) -> set[Finish | None]:
    return {pieces[-1].finish for pieces in client.received.values() if pieces}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "fault",
    [
        Stick(0.32, "worker0", 2.0),
        Kill(0.32, SCHEDULER, 0.3),
        Kill(0.32, "worker0", 0.3),
        Stop(0.32, SCHEDULER, 0.9),
    ],
    ids=str,
)
def test_a_deadline_holds_whatever_happens(fault: Fault, form: str) -> None:
    """What came before it stays, and it is over soon after, the time of a restart included."""
    wishes = [
        replace(wish, submit=msgspec.structs.replace(wish.submit, left=0.05))
        for wish in calm(form).wishes
    ]
    cell = run(replace(calm(form), workers=1, wishes=wishes, faults=[fault]))
    assert all(client.times[-1] < 0.3 + 0.05 + 1.5 for client in cell.clients)
    assert any(Finish.TIMEOUT in ends(client) for client in cell.clients)


def test_the_queue_counts_for_a_deadline() -> None:
    draw = random.Random("late")
    first = Wish(0.3, 0, make_submit("r0", "greedy", draw, max_tokens=30))
    late = make_submit("r1", "greedy", draw, max_tokens=5)
    second = Wish(0.31, 0, msgspec.structs.replace(late, left=0.1))
    cell = run(replace(calm("greedy"), workers=1, slots=1, wishes=[first, second]))
    assert [ends(client) for client in cell.clients] == [{Finish.LENGTH}, {Finish.TIMEOUT}]
    assert cell.clients[1].times[-1] < 0.31 + 0.1 + 0.06


@pytest.mark.parametrize("lost", [None, "Rejected", "Submit", "Outputs"])
def test_more_than_the_queue_holds_is_refused_at_once(lost: str | None) -> None:
    """Who was taken in is not refused later, though the scheduler dies and hears of it again."""
    draw = random.Random("crowd")
    wishes = [
        Wish(0.3 + 0.001 * n, 0, make_submit(f"r{n}", "seeded", draw), frozenset({"overloaded"}))
        for n in range(20)
    ]
    faults: list[Fault] = [Kill(Moment("Outputs", 4), SCHEDULER, 0.3)]
    if lost is not None:
        faults.append(Mangle(0.3, Mangling("drop", lost, chance=0.5, times=9), seconds=0.3))
    cell = run(replace(calm("seeded"), wishes=wishes, slots=2, room=Room(4, 10_000), faults=faults))
    refused = [client for client in cell.clients if client.rejected is not None]
    assert 1 <= len(refused) <= 14
    assert all(client.times[-1] < 0.4 for client in refused if lost is None)


LACKING = 22
"""Blocks by which the last worker is too small for `large`."""


LARGE_FORMS = ("seeded", "n2", "beam", "guided beam", "embedding")


def large(form: str) -> Submit:
    submit = make_submit("r0", form, random.Random(1), max_tokens=14)
    return msgspec.structs.replace(submit, prompt=pack_ints(range(LONGEST - 14)))


@pytest.mark.parametrize("form", LARGE_FORMS)
@pytest.mark.parametrize("also", [[], [Kill(Moment("Result", 3), SCHEDULER, 0.3)]], ids=str)
@pytest.mark.parametrize(("down", "refused"), [(20.0, False), (40.0, True)])
def test_what_only_a_lost_worker_can_hold_waits_for_it_for_a_while(
    down: float, refused: bool, also: list[Fault], form: str
) -> None:
    """Whoever schedules by then, and whatever came of it before; then it is told once why."""
    wish = Wish(1.5, 0, large(form), frozenset({"too_long"} if refused else ()))
    others = [replace(wish, time=2.0) for wish in calm(form).wishes[1:]]
    faults = [Kill(Moment("Result", 3), "worker0", down), *also]
    cell = run(replace(calm(form), wishes=[wish, *others], lacking=LACKING, faults=faults))
    first, *rest = (client.rejected for client in cell.clients)
    assert rest == [None]
    assert (first is not None) == refused
    assert first is None or "more than a worker can hold" in first.text
    assert cell.world.now > (32 if refused else down)


@pytest.mark.parametrize("form", LARGE_FORMS)
@pytest.mark.parametrize("end", [Kill, Terminate])
@pytest.mark.parametrize(("down", "refused"), [(20.0, False), (40.0, True)])
def test_what_comes_while_only_a_lost_worker_can_hold_it_waits_as_long(
    down: float, refused: bool, end: type[Kill] | type[Terminate], form: str
) -> None:
    """And what it could not hold either is refused at once."""
    refusals = frozenset({"too_long"} if refused else ())
    fitting = Wish(4.0, 0, large(form), refusals)
    longer = msgspec.structs.replace(large("seeded"), request="r1", prompt=pack_ints(range(99)))
    wishes = [fitting, Wish(4.0, 0, longer, frozenset({"too_long"}))]
    scenario = replace(
        calm(form), wishes=wishes, lacking=LACKING, faults=[end(2.0, "worker0", down)]
    )
    first, second = run(scenario).clients
    assert second.rejected is not None
    assert second.times[-1] < 4.1
    assert (first.rejected is not None) == refused
    assert first.times[-1] > (31 if refused else down)


def test_a_new_request_waits_until_all_workers_of_a_new_scheduler_are_heard() -> None:
    """Though it fits none of those that were heard first."""
    late = Interrupt(2.0, "worker0", 0.6, inward=False, outward=True, mode="hold")
    restart: list[Fault] = [Kill(2.0, SCHEDULER, 0.1), late]
    wishes = [Wish(2.5, 0, large("seeded"))]
    run(replace(calm("seeded"), wishes=wishes, lacking=LACKING, faults=restart))


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_moves_within_its_class_if_it_can(form: str) -> None:
    """Otherwise it keeps what was delivered, and the move is counted."""
    kill: list[Fault] = [Kill(Moment("Outputs", 3), "worker0", 5.0)]
    classes = {1: ("one", "two"), 0: ("one", "two", "one", "two")}
    for changes, numerics in classes.items():
        scenario = replace(calm(form), workers=len(numerics), classes=numerics, faults=kill)
        cell = Cell(scenario)
        cell.live()
        scheduler = cell.running[SCHEDULER]
        assert isinstance(scheduler, SchedulerProcess)
        counted = scheduler.core.placement.class_changes
        assert (counted > 0) <= changes
        if form in ("greedy", "logprobs", "penalties"):
            assert (counted > 0) == bool(changes)


@pytest.mark.parametrize("form", ["greedy", "logprobs", "penalties"])
def test_a_new_scheduler_knows_the_classes_of_streams(form: str) -> None:
    """They wait for a worker that computes their bits; one that went on elsewhere is counted."""
    late = Moment("Outputs", 3)
    for classes, changes in (("one", "one"), 0), (("one", "two"), 1):
        faults: list[Fault] = [Kill(late, SCHEDULER, 0.3), Kill(late, "worker0", 5.0)]
        cell = Cell(replace(calm(form), classes=classes, faults=faults))
        cell.live()
        scheduler = cell.running[SCHEDULER]
        assert isinstance(scheduler, SchedulerProcess)
        assert (scheduler.core.placement.class_changes > 0) == bool(changes)


@pytest.mark.parametrize("form", ["seeded", "n2", "logprobs"])
@pytest.mark.parametrize("also", [[], [Kill(39.8, SCHEDULER, 0.1)]], ids=str)
def test_a_stream_that_nobody_knows_any_more_is_generated_again_in_its_class(
    form: str, also: list[Fault]
) -> None:
    """Its gateway died and its scheduler forgot it, though another worker computed less so far."""
    submit = make_submit("r0", form, random.Random(7), max_tokens=14, min_tokens=14)
    faults: list[Fault] = [Kill(Moment("Outputs", 5), "gateway0", 1.0), *also]
    cell = run(
        replace(
            calm(form),
            classes=("one", "two"),
            caching=False,
            wishes=[Wish(0.3, 0, submit, resumes=40.0)],
            gateways=2,
            faults=faults,
        )
    )
    first, last = cell.clients
    computed = [
        {item.numerics for items in client.received.values() for item in items}
        for client in (first, last)
    ]
    assert len(computed[0]) == 1
    assert computed[1] == computed[0]


def test_a_client_that_does_not_read_stops_only_itself() -> None:
    """It gives up what it holds to who waits, for the minute after which its gateway ends it."""
    draw = random.Random("slow")
    silent = msgspec.structs.replace(make_submit("r0", "greedy", draw, max_tokens=30), window=3)
    wishes = [
        Wish(0.3, 0, silent, pace=1000.0),
        *(Wish(1.0 + n, 0, make_submit(f"r{n + 1}", "seeded", draw)) for n in range(55)),
    ]
    cell = Cell(
        replace(
            calm("greedy"),
            workers=1,
            slots=1,
            blocks=12,
            wishes=wishes,
            faults=[Leave(60.3, "r0", None)],
        )
    )
    cell.live()
    reader, *others = cell.clients
    assert sum(len(piece.tokens) // 4 for piece in reader.received[0]) == 3
    assert all(client.times[-1] < 1.0 + n + 0.5 for n, client in enumerate(others))
    assert 60 < cell.world.now < 61
