"""Answers that keep more than tokens, beams and a grammar's state, under the same injuries.

What has to come is what came before, without faults.
"""

import pytest

from tests.faults.conftest import Load, assert_exact, rehearse
from tests.faults.proxy import Action


@pytest.fixture
def load(cell, questions):
    load = Load(questions, forms=["beam", "guided", "seeded"], tokens=30, stream=False)
    rehearse(cell, load)
    return load


@pytest.mark.parametrize("plan", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_worker_dies(cell, load, plan):
    rule = cell.worker_proxy.act(
        "Plan", Action.PASS, first=plan, call=lambda link: cell.worker_of(link).kill()
    )
    assert_exact(load.run(cell))
    assert rule.fired == 1


@pytest.mark.parametrize("plan", [20, pytest.param(3, marks=pytest.mark.slow)])
def test_the_scheduler_dies(cell, load, plan):
    rule = cell.worker_proxy.act(
        "Plan", Action.PASS, first=plan, call=lambda link: cell.scheduler.restart()
    )
    assert_exact(load.run(cell))
    assert rule.fired == 1


@pytest.mark.parametrize("tag", ["Plan", "Result", pytest.param("Outputs", marks=pytest.mark.slow)])
def test_a_message_is_lost(cell, load, tag):
    proxy = cell.gateway_proxy if tag == "Outputs" else cell.worker_proxy
    rule = proxy.act(tag, Action.DROP, first=2)
    assert_exact(load.run(cell))
    assert rule.fired == 1
