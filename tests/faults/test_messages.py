"""Every message between the services lost, repeated, late, in the wrong order or broken.

What follows is never a wrong token: the streams are exact, or a client is told of an error. A bit
that flips inside a message's payload is not among the faults: a Unix socket does not do that.
"""

import pytest

from tests.faults.conftest import Load, assert_exact, once
from tests.faults.proxy import Action

MESSAGES = {
    "gateway_proxy": ("Submit", "GatewayBeat", "Outputs", "Pulse"),
    "worker_proxy": ("Plan", "Result", "WorkerBeat"),
}
QUICK = (
    *(("Submit", Action.DROP), ("Outputs", Action.DROP), ("Outputs", Action.REPEAT)),
    *(("Plan", Action.DROP), ("Plan", Action.REORDER), ("Result", Action.DROP)),
    *(("Result", Action.REPEAT), ("Outputs", Action.CUT), ("Plan", Action.CORRUPT)),
)
"""What `make test` runs; the others are slow."""

ONCE = (Action.DROP, Action.REPEAT, Action.REORDER, Action.TRUNCATE, Action.CORRUPT, Action.CUT)


def quick_if(quick, *values):
    return pytest.param(*values, marks=() if quick else pytest.mark.slow)


CELLS = [
    quick_if((tag, action) in QUICK, proxy, tag, action)
    for proxy, tags in MESSAGES.items()
    for tag in tags
    for action in ONCE
]


@pytest.mark.parametrize(("proxy", "tag", "action"), CELLS)
def test_one_message(cell, questions, proxy, tag, action):
    rule = getattr(cell, proxy).act(tag, action, first=2)
    assert_exact(Load(questions).run(cell))
    assert rule.fired == 1


@pytest.mark.parametrize("proxy", ["gateway_proxy", "worker_proxy"])
@pytest.mark.parametrize(
    "action", [quick_if(a is Action.DROP, a) for a in ONCE if a is not Action.CUT]
)
def test_one_message_in_a_hundred(cell, questions, proxy, action):
    """Of all kinds, until one was drawn: some load in five is spared."""
    rule = getattr(cell, proxy).act(None, action, share=0.01)
    while not rule.fired:
        assert_exact(Load(questions, tokens=80).run(cell))
        assert rule.seen < 10_000


@pytest.mark.parametrize("seconds", [0.1, pytest.param(1.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tag", ["Outputs", "Plan", "Result"])
def test_a_late_message(cell, questions, tag, seconds):
    proxy = cell.gateway_proxy if tag == "Outputs" else cell.worker_proxy
    rule = proxy.act(tag, Action.DELAY, first=5, seconds=seconds)
    assert_exact(Load(questions).run(cell))
    assert rule.fired == 1


@pytest.mark.slow
@pytest.mark.parametrize("tag", ["Welcome", "GatewayHello", "WorkerHello", "Join"])
@pytest.mark.parametrize("action", [Action.DROP, Action.REPEAT, Action.CORRUPT])
def test_the_handshake(cell, questions, tag, action):
    """Of a scheduler that comes new into a load."""
    proxy = cell.gateway_proxy if tag in ("Welcome", "GatewayHello") else cell.worker_proxy
    rule = proxy.act(tag, action)
    watch = once(lambda answer: answer.tokens >= 5, cell.scheduler.restart)
    assert_exact(Load(questions).run(cell, watch))
    assert rule.fired == 1


@pytest.mark.parametrize("proxy", ["gateway_proxy", "worker_proxy"])
def test_every_connection_breaks(cell, questions, proxy):
    cut = []
    watch = once(
        lambda answer: answer.tokens >= 10, lambda: cut.append(getattr(cell, proxy).cut_all())
    )
    assert_exact(Load(questions).run(cell, watch))
    assert cut[0] >= 1
