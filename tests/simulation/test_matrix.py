"""Each fault at each moment of each form of request: the stream is exact, and the cell rests.

Moments are counted in messages, so that they are the same in every run until the fault strikes. A
fault that never struck fails its test.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle, pairwise
from typing import get_args

import msgspec
import pytest

from pagefleet.wire import Plan
from tests.simulation.cell import Cell, Scenario, Wish
from tests.simulation.clients import FORMS, make_submit
from tests.simulation.faults import (
    Fail,
    Fault,
    Interrupt,
    Kill,
    Leave,
    Mangle,
    Reconnect,
    Stick,
    Stop,
    Terminate,
)
from tests.simulation.network import SCHEDULER, Latency, Mangling, Manner, Moment, Severity
from tests.simulation.parties import SchedulerProcess
from tests.simulation.scenarios import KINDS

When = float | Moment

MIDDLE = Moment("Outputs", 10)


@cache
def calm(form: str) -> Scenario:
    """A request of a form, with another beside it, in a cell without faults."""
    draw = random.Random(form)
    wishes = [
        Wish(0.3, 0, make_submit("r0", form, draw, max_tokens=8)),
        Wish(0.301, 0, make_submit("r1", "seeded", draw, max_tokens=6)),
    ]
    return Scenario(
        seed=0, wishes=wishes, blocks=30, budget=8, drafts=3, step_seconds=(0.01, 0.011)
    )


@cache
def last(form: str, kind: str, gateways: int = 1) -> int:
    """How many messages of a kind a run without faults has."""
    cell = Cell(replace(calm(form), gateways=gateways))
    cell.live()
    return cell.network.count(kind)


def moments(form: str, gateways: int = 1) -> list[When]:
    """Idle, queued, at the first chunks of the prompt, at the first token, before and after steps
    in the middle, at the last token.
    """
    results = last(form, "Result", gateways)
    return [
        0.2,
        Moment("Submit", 1),
        *(Moment("Plan", step) for step in (1, 2, 3, results // 2)),
        *(Moment("Result", step, "sent") for step in (2, results // 2, results)),
        Moment("Outputs", 1),
    ]


def run(scenario: Scenario) -> Cell:
    """Live through it, with every fault."""
    cell = Cell(scenario)
    cell.live()
    assert len(cell.struck) == len(scenario.faults)
    assert all(mangling.done for mangling in cell.network.manglings)
    return cell


@pytest.mark.parametrize("form", FORMS)
def test_worker0_runs_the_request_of_the_form(form: str) -> None:
    plans = [each for each in run(calm(form)).world.story if isinstance(each.message, Plan)]
    assert "-> worker0" in plans[0].what


def test_some_drafts_are_kept_and_some_are_not() -> None:
    scheduler = run(calm("repeating")).running[SCHEDULER]
    assert isinstance(scheduler, SchedulerProcess)
    figures = [worker.stats() for worker in scheduler.core.workers]
    assert 0 < sum(each.drafts_kept for each in figures) < sum(each.drafted for each in figures)


FAULTS: dict[str, Callable[[When], list[Fault]]] = {
    "worker killed": lambda when: [Kill(when, "worker0", 1.0)],
    "worker killed elsewhere": lambda when: [Kill(when, "worker0", 1.0, watched=False)],
    "both workers killed": lambda when: [
        Kill(when, "worker0", 1.0), Kill(when, "worker1", 1.5, watched=False),
    ],
    "worker told to end": lambda when: [Terminate(when, "worker0", 0.5)],
    "scheduler told to end": lambda when: [Terminate(when, SCHEDULER, 0.5)],
    "gateway told to end": lambda when: [Terminate(when, "gateway0", 0.5)],
    "worker stopped for 0.3 s": lambda when: [Stop(when, "worker0", 0.3)],
    "worker stopped for 2 s": lambda when: [Stop(when, "worker0", 2.0)],
    "worker stopped for 10 s": lambda when: [Stop(when, "worker0", 10.0)],
    "computation stuck": lambda when: [Stick(when, "worker0", 3.0)],
    "scheduler killed": lambda when: [Kill(when, SCHEDULER, 0.5)],
    "scheduler stopped for 3 s": lambda when: [Stop(when, SCHEDULER, 3.0)],
    "gateway killed": lambda when: [Kill(when, "gateway0", 0.5)],
    "gateway stopped for 3 s": lambda when: [Stop(when, "gateway0", 3.0)],
    "everything killed": lambda when: [
        Kill(when, name, 0.4) for name in ("worker0", "worker1", SCHEDULER)
    ],
    "everything stopped for 40 s": lambda when: [
        Stop(when, name, 40.0 + late)
        for name, late in (("worker0", 0.5), ("worker1", 0.0), (SCHEDULER, 0.3), ("gateway0", 0.2))
    ],
    "client leaves": lambda when: [Leave(when, "r0", None)],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_at_every_moment(fault: str, form: str) -> None:
    for when in moments(form):
        run(replace(calm(form), faults=FAULTS[fault](when)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "loss",
    [
        lambda when: [Kill(when, "gateway0", 8.0)],
        lambda when: [Kill(when, "gateway0", 8.0), Kill(when, SCHEDULER, 0.5)],
        lambda when: [Kill(when, "gateway0", 8.0), Kill(when, "worker0", 1.0, watched=False)],
        lambda when: [Terminate(when, "gateway0", 8.0)],
        lambda when: [Stop(when, "gateway0", 3.0)],
        lambda when: [Reconnect(when, "r0", closes=True)],
        lambda when: [Reconnect(when, "r0", closes=False)],
    ],
    ids=[
        *("killed", "killed with the scheduler", "killed with a worker", "told to end", "stopped"),
        *("closed", "half open"),
    ],
)
def test_a_client_goes_on_at_another_gateway(
    loss: Callable[[When], list[Fault]], form: str
) -> None:
    for seconds, when in zip(cycle((0.05, 1.0, 5.0)), moments(form, gateways=2), strict=False):
        wishes = [replace(wish, resumes=seconds) for wish in calm(form).wishes]
        faults = [*loss(when), Reconnect(1.0, "r0", closes=False)]
        run(replace(calm(form), wishes=wishes, gateways=2, faults=faults))


@pytest.mark.parametrize(
    ("fault", "resumes", "moved", "recalled"),
    [
        (Kill(MIDDLE, "gateway0", 1.0), 0.05, 1, 0),
        (Kill(MIDDLE, "gateway0", 1.0), 5.0, 0, 1),
        (Kill(MIDDLE, "gateway0", 1.0), 40.0, 0, 0),
        (Reconnect(MIDDLE, "r0", closes=True), None, 0, 1),
        (Reconnect(MIDDLE, "r0", closes=False), None, 1, 0),
    ],
)
@pytest.mark.parametrize("form", ["seeded", "logprobs", "guided"])
def test_a_stream_that_goes_on_is_not_generated_again(
    form: str, fault: Fault, resumes: float | None, moved: int, recalled: int
) -> None:
    """While it is open, and for 30 seconds after."""
    submit = make_submit("r0", form, random.Random(7), max_tokens=14, min_tokens=14)
    params = msgspec.structs.replace(submit.params, prompt_logprobs=None)
    submit = msgspec.structs.replace(submit, window=6, params=params)
    wish = Wish(0.3, 0, submit, pace=0.01, resumes=resumes)
    cell = run(replace(calm(form), wishes=[wish], gateways=2, faults=[fault]))
    scheduler = cell.running[SCHEDULER]
    assert isinstance(scheduler, SchedulerProcess)
    admission = scheduler.core.admission
    assert (admission.moved, admission.recalled) == (moved, recalled)
    first, last = cell.clients
    assert last.submit.request == "r0+"
    assert not last.open
    assert (first.rejected is not None) == (isinstance(fault, Reconnect) and not fault.closes)


@pytest.mark.parametrize("form", FORMS)
def test_a_failed_step_is_computed_again(form: str) -> None:
    for step in range(1, last(form, "Plan")):
        run(replace(calm(form), faults=[Fail(Moment("Plan", step), "worker0")]))


@cache
def crowd() -> Scenario:
    """Requests of all forms at once, in a pool that is too small for them."""
    draw = random.Random("crowd")
    wishes = [
        Wish(0.3 + 0.01 * number, number % 2, make_submit(f"r{number}", form, draw, max_tokens=8))
        for number, form in enumerate(FORMS)
    ]
    return Scenario(seed=0, wishes=wishes, gateways=2, blocks=18, slots=4, budget=8, drafts=3)


@pytest.mark.parametrize("how", get_args(Manner))
@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_a_kind(kind: str, how: Manner) -> None:
    """The first, the third, and one of a hundred."""
    restart = Terminate(0.45, "worker0", 0.1)
    leave = Leave(0.4, "r1", None)
    for chance, times, skip in ((1.0, 1, 0), (1.0, 1, 2), (0.01, 100, 0)):
        mangling = Mangling(how, kind, chance, times, skip, seconds=0.3)
        faults = [Mangle(0.0, mangling, seconds=2.0), restart, leave]
        Cell(replace(crowd(), faults=faults)).live()


@pytest.mark.parametrize("seconds", [0.2, 2.0, 20.0])
@pytest.mark.parametrize("mode", get_args(Severity))
@pytest.mark.parametrize("peer", ["worker0", "gateway0"])
def test_a_link_goes_down(peer: str, mode: Severity, seconds: float) -> None:
    for inward, outward in ((True, True), (True, False), (False, True)):
        fault = Interrupt(0.35, peer, seconds, inward, outward, mode)
        run(replace(crowd(), faults=[fault]))


def test_a_row_that_fails_ends_its_request_and_no_other() -> None:
    for step in range(1, 12):
        fail = Fail(Moment("Plan", step), "worker0", "row")
        wishes = [replace(wish, refusals=frozenset({"failed"})) for wish in crowd().wishes]
        cell = run(replace(crowd(), workers=1, wishes=wishes, faults=[fail]))
        assert sum(client.rejected is not None for client in cell.clients) == 1


def test_a_restart_of_everything_one_after_another() -> None:
    names = ["worker0", "worker1", SCHEDULER]
    faults = [
        fault(0.35 + 0.3 * number, name, 0.2)
        for number, name in enumerate(names)
        for fault in [Kill if name == SCHEDULER else Terminate]
    ]
    run(replace(crowd(), faults=faults))


def test_without_any_worker_there_is_one_clear_refusal() -> None:
    wishes = [replace(wish, refusals=frozenset({"no_worker"})) for wish in crowd().wishes]
    cell = Cell(replace(crowd(), workers=1, wishes=wishes, faults=[Kill(0.4, "worker0", 40.0)]))
    cell.live()
    refused = [client.rejected for client in cell.clients if client.rejected is not None]
    assert refused
    assert {each.text for each in refused} == {"No worker has joined for 30 seconds."}


def test_without_a_scheduler_there_is_one_clear_refusal() -> None:
    wishes = [replace(wish, refusals=frozenset({"no_worker"})) for wish in crowd().wishes]
    cell = Cell(replace(crowd(), wishes=wishes, faults=[Kill(0.4, SCHEDULER, 40.0)]))
    cell.live()
    refused = [client.rejected for client in cell.clients if client.rejected is not None]
    assert {each.text for each in refused} == {"No scheduler answers. Try again later."}


def alone(*faults: Fault, window: int = 0, pace: float = 0.0) -> Scenario:
    """One long request, in a cell with faults."""
    submit = make_submit("r0", "greedy", random.Random(1), max_tokens=30)
    wish = Wish(0.3, 0, msgspec.structs.replace(submit, window=window), pace=pace)
    return replace(calm("greedy"), wishes=[wish], faults=list(faults))


def gap(*faults: Fault, workers: int = 2) -> float:
    """The longest that a client waits between tokens, with faults in the middle of its stream."""
    cell = run(replace(alone(*faults), workers=workers))
    (client,) = cell.clients
    return max(later - earlier for earlier, later in pairwise(client.times))


def losing(kind: str) -> Fault:
    return Mangle(MIDDLE, Mangling("drop", kind, chance=1.0, times=1), seconds=1.0)


@pytest.mark.parametrize(
    ("fault", "seconds"),
    [
        (losing("Outputs"), 0.6),
        (losing("Plan"), 1.6),
        (losing("Result"), 1.6),
        (losing("WorkerBeat"), 0.1),
        (losing("GatewayBeat"), 0.1),
        (Kill(MIDDLE, "worker0", 1.0), 0.2),
        (Kill(MIDDLE, "worker0", 1.0, watched=False), 1.5),
        (Terminate(MIDDLE, "worker0", 1.0), 0.2),
        (Stop(MIDDLE, "worker0", 0.3), 0.4),
        (Stop(MIDDLE, "worker0", 30.0), 1.5),
        (Stick(MIDDLE, "worker0", 60.0), 1.6),
        (Fail(MIDDLE, "worker0"), 0.2),
        (Kill(MIDDLE, SCHEDULER, 0.5), 2.0),
        (Stop(MIDDLE, SCHEDULER, 2.0), 3.0),
        (Stop(MIDDLE, "gateway0", 1.5), 2.5),
        (Interrupt(MIDDLE, "worker0", 10.0, True, True, "lose"), 1.5),
        (Interrupt(MIDDLE, "worker0", 10.0, True, False, "lose"), 2.6),
        (Interrupt(MIDDLE, "worker0", 10.0, False, True, "lose"), 1.5),
        (Interrupt(MIDDLE, "gateway0", 1.0, True, True, "lose"), 1.7),
    ],
    ids=str,
)
def test_how_long_a_stream_pauses(fault: Fault, seconds: float) -> None:
    """With a worker to spare."""
    assert gap(fault) <= seconds


def runs(cell: Cell) -> int:
    """How often a sequence began to run at a worker."""
    messages = [incident.message for incident in cell.world.story]
    plans = {(each.epoch, each.step): each for each in messages if isinstance(each, Plan)}
    return sum(len(plan.opens) for plan in plans.values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seconds", [0.7, 2.0, 10.0])
def test_a_scheduler_that_was_stopped_holds_nobody_lost(seconds: float, form: str) -> None:
    for when in moments(form):
        cell = run(replace(calm(form), faults=[Stop(when, SCHEDULER, seconds)]))
        assert cell.network.count("Fence") == 0


@pytest.mark.parametrize("seconds", [0.7, 2.0, 10.0])
def test_a_scheduler_that_was_stopped_computes_nothing_again(seconds: float) -> None:
    """Of what has not ended by the time that the gateway can be reached again."""
    for nth in range(1, 11):
        stopped = alone(Stop(Moment("Outputs", nth), SCHEDULER, seconds))
        assert runs(run(replace(stopped, step_seconds=(0.05, 0.051)))) == 1


def test_a_worker_that_computes_nothing_is_not_let_in_again() -> None:
    assert gap(Stick(MIDDLE, "worker0", 5.0), workers=1) < 7.0


def test_a_client_that_leaves_is_forgotten_though_its_abort_is_lost() -> None:
    """Also if its stream waits for credit, so that no token comes that could be answered."""
    lost = Mangle(0.0, Mangling("drop", "Abort", chance=1.0, times=1), seconds=1.0)
    cell = run(alone(lost, Leave(0.8, "r0", None), window=2, pace=60.0))
    assert cell.world.now < 1.3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "crashes"), [(0, 3), (2, 4)])
def test_a_poison_is_refused_and_nobody_else(tokens: int, crashes: int, form: str) -> None:
    """After one crash that it shared, and two alone; if the token before was lost in the first, it
    comes again when it runs alone, so that there is another crash before these.
    """
    draw = random.Random("poison")
    poison = Wish(
        0.35,
        0,
        make_submit("poison", form, draw, max_tokens=6, seed=4711),
        frozenset({"quarantined"}),
    )
    cell = run(
        replace(
            crowd(), wishes=[*crowd().wishes, poison], poison=4711, poison_tokens=tokens, slots=9
        )
    )
    refused = [client.submit.request for client in cell.clients if client.rejected is not None]
    if poison.submit.params.max_tokens > tokens:
        assert refused == ["poison"]
        assert 2 <= cell.crashes <= crashes


def test_a_hundred_poisons_under_load() -> None:
    """Each ends three workers at most, and every other stream is exact."""
    draw = random.Random("poisons")
    poisons = [
        Wish(
            0.3 + 1.1 * number + draw.random(),
            number % 2,
            make_submit(f"poison{number}", draw.choice(list(FORMS)), draw, seed=4711),
            frozenset({"quarantined"}),
        )
        for number in range(100)
    ]
    others = [
        Wish(0.3 + 0.25 * number, number % 2, make_submit(f"r{number}", form, draw))
        for number, form in enumerate(draw.choices(list(FORMS), k=440))
    ]
    cell = run(
        replace(crowd(), wishes=[*poisons, *others], poison=4711, slots=8, blocks=60, workers=3)
    )
    refused = {client.submit.request for client in cell.clients if client.rejected is not None}
    assert refused == {wish.submit.request for wish in poisons}
    assert 200 <= cell.crashes <= 300


@pytest.mark.parametrize(("apart", "watched"), [(0.2, True), (0.05, False)])
def test_nobody_is_refused_for_chance_deaths(apart: float, watched: bool) -> None:
    """Workers die ten times in a row, with all that they run, suspects among it."""
    kills = [Kill(0.32 + apart * n, f"worker{n % 2}", 0.04, watched) for n in range(10)]
    run(replace(crowd(), faults=list[Fault](kills)))


def test_a_round_trip_longer_than_hellos_are_apart() -> None:
    cell = run(replace(crowd(), wishes=crowd().wishes[:1], latency=Latency(0.5, 0.6)))
    assert cell.network.count("Fence") == 0
