"""Processes that stop for a while and go on (SIGSTOP, SIGCONT), and computations that hang."""

import asyncio
import contextlib

import pytest

from pagefleet_gateway.cell.link import PATIENCE_SECONDS
from pagefleet_scheduler.liveness import WORKER_SILENCE
from tests.faults.cell import wait_until
from tests.faults.conftest import Load, assert_exact, once


async def stop_for(service, seconds, when):
    """Stop a service for some seconds once `when` is set."""
    await when.wait()
    with service.stopped():
        await asyncio.sleep(seconds)


def run_with_stop(cell, load, service, seconds, tokens=10):
    """Stop a service under a load, when the first of its streams has so many tokens."""

    async def stop():
        await stop_for(service, seconds, begun)

    begun = asyncio.Event()
    watch = once(lambda answer: answer.tokens >= tokens, begun.set)
    answers = load.run(cell, watch, stop())
    assert watch.struck
    return answers


@pytest.mark.parametrize("seconds", [0.3, 2.5])
def test_a_worker_stops(cell, questions, seconds):
    """Also of one that is found out and comes back as a zombie, nothing is believed."""
    voids = cell.total("link_conflicts")
    answers = run_with_stop(cell, Load(questions, tokens=60), cell.workers[0], seconds)
    assert_exact(answers)
    assert max(answer.longest_gap for answer in answers) > min(seconds, WORKER_SILENCE) / 2
    assert cell.total("link_conflicts") == voids


@pytest.mark.slow
def test_a_worker_stops_for_ten_seconds(cell, questions):
    answers = run_with_stop(cell, Load(questions, tokens=60), cell.workers[0], 10)
    assert_exact(answers)
    assert max(answer.longest_gap for answer in answers) < 10


@pytest.mark.slow
def test_the_only_worker_stops(cell, questions):
    cell.workers[1].kill()
    assert_exact(run_with_stop(cell, Load(questions, tokens=30), cell.workers[0], 3.0))


@pytest.mark.parametrize("seconds", [pytest.param(0.5, marks=pytest.mark.slow), 2.5])
def test_the_scheduler_stops(cell, questions, seconds):
    answers = run_with_stop(cell, Load(questions, tokens=60), cell.scheduler, seconds)
    assert_exact(answers)
    assert max(answer.longest_gap for answer in answers) > seconds / 2


@pytest.mark.slow
def test_the_scheduler_stops_for_ten_seconds(cell, questions):
    assert_exact(run_with_stop(cell, Load(questions, tokens=60), cell.scheduler, 10))


@pytest.mark.parametrize("seconds", [0.5, pytest.param(4.0, marks=pytest.mark.slow)])
def test_a_gateway_stops(cell, questions, seconds):
    """Longer than its lease: it submits again what it has open."""
    answers = run_with_stop(cell, Load(questions, tokens=80), cell.gateways[0], seconds)
    assert_exact(answers)
    assert max(answer.longest_gap for answer in answers) > seconds / 2


@pytest.mark.slow
def test_all_stop_for_longer_than_a_gateway_waits_for_a_scheduler(cell, questions):
    """As in a machine that sleeps, or a container that is paused."""

    async def stop():
        await begun.wait()
        with contextlib.ExitStack() as stack:
            for service in cell.services:
                stack.enter_context(service.stopped())
            await asyncio.sleep(PATIENCE_SECONDS + 2)

    begun = asyncio.Event()
    watch = once(lambda answer: answer.tokens >= 10, begun.set)
    assert_exact(Load(questions, tokens=80).run(cell, watch, stop()))


def run_with_schedule(cell, load, faults):
    """Put a load on two workers, one of which has a schedule of faults."""
    worker = cell.workers[0]
    joined = worker.said("may join")
    worker.restart(faults)
    wait_until(lambda: worker.said("may join") > joined)
    try:
        return load.run(cell)
    finally:
        cell.workers[0].restart()


def test_a_computation_hangs(cell, questions):
    """The I/O thread lives and beats; progress is what counts."""
    said = cell.workers[0].said("fault point worker.step: sleep")
    load = Load(questions, tokens=60)
    assert_exact(run_with_schedule(cell, load, "worker.step:sleep=60@20"))
    assert cell.workers[0].said("fault point worker.step: sleep") == said + 1


@pytest.mark.slow
def test_a_worker_that_finds_no_way_back_gives_up(cell, questions):
    """Fenced, with its computation stuck for good: it ends, so that another can be started."""
    worker = cell.workers[0]
    joined = worker.said("may join")
    worker.restart("worker.step:sleep=600@20")
    wait_until(lambda: worker.said("may join") > joined)
    assert_exact(Load(questions, tokens=60).run(cell))
    wait_until(lambda: not worker.alive)
    assert worker.said("this worker gives up: fenced, and not let in again for 10 s")
    worker.restart()


def test_a_step_fails(cell, questions):
    said = cell.workers[0].said("fault point worker.step: raise")
    load = Load(questions, tokens=60)
    assert_exact(run_with_schedule(cell, load, "worker.step:raise@20"))
    assert cell.workers[0].said("fault point worker.step: raise") == said + 1


def test_a_worker_ends_in_a_step(cell, questions):
    load = Load(questions, tokens=60)
    said = cell.workers[0].said("fault point worker.step: exit")
    assert_exact(run_with_schedule(cell, load, "worker.step:exit=1@20"))
    assert cell.workers[0].said("fault point worker.step: exit") == said + 1


def test_logits_of_one_row_are_nan(cell, questions):
    """Only the client whose row it was is told so."""
    answers = run_with_schedule(cell, Load(questions, tokens=60), "echo.logits:corrupt@50")
    failed = [answer for answer in answers if answer.error is not None]
    assert len(failed) == 1
    assert_exact([answer for answer in answers if answer is not failed[0]])
    expected = failed[0].question.expected
    assert all(tokens == expected[i][: len(tokens)] for i, tokens in failed[0].choices.items())
