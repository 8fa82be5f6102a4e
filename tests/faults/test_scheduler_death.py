"""SIGKILL the scheduler: the gateways submit again what they have, the workers say hello again."""

import asyncio

import pytest

from tests.faults.cell import wait_until
from tests.faults.conftest import Load, assert_exact, once
from tests.faults.proxy import Action

TOKENS = 40


def test_idle(cell, questions):
    cell.scheduler.restart()
    assert_exact(Load(questions).run(cell))


@pytest.mark.parametrize("tokens", [1, TOKENS // 2, TOKENS - 1])
def test_between_tokens(cell, questions, tokens):
    resubmitted = cell.total("link_resubmissions")
    watch = once(lambda answer: answer.tokens >= tokens, cell.scheduler.restart)
    assert_exact(Load(questions, tokens=TOKENS).run(cell, watch))
    assert watch.struck
    assert cell.total("link_resubmissions") > resubmitted


def test_when_a_request_has_just_been_accepted(cell, questions):
    cell.gateway_proxy.act(
        "Submit", Action.PASS, first=3, call=lambda link: cell.scheduler.restart()
    )
    assert_exact(Load(questions, prompt=150, tokens=4, stream=False).run(cell))
    assert cell.gateway_proxy.rules[0].fired == 1


def test_while_a_client_leaves(cell, questions):
    """Its abort is lost with the scheduler; its blocks are free all the same."""
    rule = cell.gateway_proxy.act("Abort", Action.DROP, call=lambda link: cell.scheduler.restart())
    leaving = once(lambda answer: answer.tokens >= 5, leave)
    with pytest.raises(Leaving):
        Load(questions, forms=["greedy"], tokens=3000).run(cell, leaving)
    wait_until(lambda: rule.fired == 1)
    assert_exact(Load(questions).run(cell))


def test_with_the_worker(cell, questions):
    watch = once(
        lambda answer: answer.tokens >= 10,
        lambda: (cell.workers[0].kill(), cell.scheduler.restart()),
    )
    assert_exact(Load(questions).run(cell, watch))
    assert watch.struck


def test_one_that_was_only_stopped_holds_nobody_lost(cell, questions):
    """The silence that it sees when it wakes is its own."""
    lost = cell.total("pagefleet_lost_workers_total")

    async def stop():
        await asyncio.sleep(0.3)
        with cell.scheduler.stopped():
            await asyncio.sleep(2)

    assert_exact(Load(questions, tokens=100).run(cell, also=stop()))
    cell.settle()
    assert cell.total("pagefleet_lost_workers_total") == lost


class Leaving(Exception):
    """The client has had enough."""


def leave():
    raise Leaving
