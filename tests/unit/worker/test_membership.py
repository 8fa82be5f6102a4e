"""The worker's talk with the scheduler, event by event."""

import pytest

from pagefleet.wire import (
    PROTOCOL,
    Fence,
    Join,
    Plan,
    Refused,
    Result,
    WorkerBeat,
    WorkerBye,
    WorkerHello,
)
from pagefleet_worker.membership import (
    BEAT_SECONDS,
    HELLO_SECONDS,
    REMEMBERED_RESULTS,
    RETRY_SECONDS,
    Membership,
    Reaction,
)

HELLO = WorkerHello(PROTOCOL, "host", 1, 1, "model", "class", 4, 50, 8, 100, 64, 1000)


def plan(step: int, epoch: int = 5) -> Plan:
    return Plan(epoch, step, b"", b"")


def result(step: int, epoch: int = 5) -> Result:
    return Result(epoch, step, b"")


@pytest.fixture
def member() -> Membership:
    membership = Membership(HELLO)
    assert membership.handle(Join(5)) == Reaction(orders=[5])
    assert membership.tick(0.0, 0) == Reaction([WorkerBeat(5, 0, False)])
    return membership


def test_hello_is_said_until_it_is_answered() -> None:
    membership = Membership(HELLO)
    assert membership.tick(0.0, 0) == Reaction([HELLO])
    assert membership.tick(HELLO_SECONDS / 2, 0) == Reaction()
    assert membership.tick(HELLO_SECONDS, 0) == Reaction([HELLO])
    membership.handle(Join(5))
    assert membership.tick(HELLO_SECONDS, 7) == Reaction([WorkerBeat(5, 7, False)])


@pytest.mark.parametrize("joined", [False, True])
def test_nothing_is_said_while_a_part_of_the_engine_is_silent(joined: bool) -> None:
    membership = Membership(HELLO)
    if joined:
        membership.handle(Join(5))
    assert membership.tick(0.0, 0, lives=False) == Reaction()
    assert membership.due == BEAT_SECONDS
    said = WorkerBeat(5, 0, False) if joined else HELLO
    assert membership.tick(BEAT_SECONDS, 0) == Reaction([said])


def test_plans_are_ordered_once_and_beats_say_so(member: Membership) -> None:
    assert member.handle(plan(0)) == Reaction(orders=[plan(0)])
    assert member.handle(plan(0)) == Reaction()
    assert member.tick(BEAT_SECONDS, 3) == Reaction([WorkerBeat(5, 3, True)])
    assert member.computed(plan(0), result(0)) == Reaction([result(0)])
    assert member.tick(2 * BEAT_SECONDS, 4) == Reaction([WorkerBeat(5, 4, False)])


def test_plans_that_come_early_wait_for_those_before(member: Membership) -> None:
    assert member.handle(plan(1)) == Reaction()
    assert not member.busy
    assert member.handle(plan(0)) == Reaction(orders=[plan(0), plan(1)])


def test_a_computed_step_is_answered_again(member: Membership) -> None:
    for step in range(REMEMBERED_RESULTS + 1):
        member.handle(plan(step))
        member.computed(plan(step), result(step))
        member.check()
    assert member.handle(plan(0)) == Reaction()
    assert member.handle(plan(1)) == Reaction([result(1)])
    assert member.handle(plan(2)) == Reaction([result(2)])


def test_a_result_that_finds_no_connection_goes_with_the_next_beat(member: Membership) -> None:
    member.handle(plan(0))
    for message in member.computed(plan(0), result(0)).messages:
        member.unsent(message, 0.0)
    beat = WorkerBeat(5, 0, False)
    assert member.tick(RETRY_SECONDS, 0) == Reaction([result(0), beat])
    assert member.tick(1.0, 0) == Reaction([beat])


def test_a_hello_that_finds_no_connection_is_said_again_soon() -> None:
    membership = Membership(HELLO)
    for message in membership.tick(0.0, 0).messages:
        membership.unsent(message, 0.0)
    assert membership.tick(RETRY_SECONDS, 0) == Reaction([HELLO])


def test_a_failed_step_ends_the_epoch(member: Membership) -> None:
    member.handle(plan(0))
    member.handle(plan(1))
    assert member.computed(plan(0), None) == Reaction([WorkerBye(5, failed=True)])
    assert member.tick(0.0, 0) == Reaction()
    assert member.computed(plan(1), None) == Reaction()
    assert member.tick(0.0, 0) == Reaction([HELLO])


def test_a_fenced_worker_asks_again_once_it_computes_nothing(member: Membership) -> None:
    member.handle(plan(0))
    member.handle(Fence("void"))
    member.check()
    assert member.tick(10.0, 0) == Reaction()
    assert member.handle(Join(5)) == Reaction()
    assert member.computed(plan(0), result(0)) == Reaction()
    assert member.tick(10.1, 0) == Reaction([HELLO])


def test_what_is_void_changes_nothing(member: Membership) -> None:
    member.handle(plan(0))
    assert member.handle(Join(5)) == Reaction()
    assert member.handle(plan(0, epoch=4)) == Reaction()
    assert member.handle(Refused("another model")) == Reaction()
    member.handle(Join(6))
    assert member.handle(plan(1)) == Reaction()
    assert member.handle(Join(5)) == Reaction()
    member.unsent(result(0), 0.0)
    assert member.computed(plan(0), result(0)) == Reaction()
    assert member.tick(1.0, 0) == Reaction([WorkerBeat(6, 0, False)])
    assert member.leave() == Reaction([WorkerBye(6)])
    assert member.leave() == Reaction()
