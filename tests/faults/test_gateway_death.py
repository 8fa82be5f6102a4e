"""SIGKILL a gateway: its clients are cut off, nobody else is, and what it held is free."""

import pytest

from benchmarks.drill.questions import SAMPLED
from tests.faults.cell import wait_until
from tests.faults.clients import connected, receive_until, send
from tests.faults.conftest import Load, assert_exact, once
from tests.faults.proxy import Action


def test_its_requests_end_and_others_go_on(cell, questions):
    watch = once(lambda answer: answer.tokens >= 10, cell.gateways[0].kill)
    lines = cell.scheduler.said("cannot be reached")
    with connected(cell.servers[0]) as sock:
        send(sock, cell.servers[0], questions.ask("greedy", 40, 3000))
        receive_until(sock, b"data: ")
        assert_exact(Load(questions).run(cell, watch, gateway=1))
    assert watch.struck
    wait_until(lambda: cell.held_blocks(gateway=1) == 0)
    assert cell.scheduler.said("cannot be reached") <= lines + 1
    cell.gateways[0].restart()
    assert_exact(Load(questions).run(cell))


@pytest.mark.parametrize(("tag", "number"), [("Submit", len(SAMPLED)), ("Outputs", 15)])
def test_a_client_that_asks_again_gets_the_same(cell, questions, tag, number):
    """Connections wait in the socket's queue until the next gateway is there."""
    load = Load(questions, tokens=60)
    cell.gateway_proxy.act(
        tag, Action.PASS, first=number, call=lambda link: cell.gateways[0].kill()
    )
    cut = load.run(cell)
    assert any(answer.error for answer in cut)
    for answer in cut:
        for index, got in answer.choices.items():
            assert got == answer.question.expected[index][: len(got)]
    cell.gateways[0].restart()
    assert_exact(load.run(cell))
