"""SIGKILL a worker at every moment of a stream: no client sees it, and nothing is left behind."""

from dataclasses import replace

import pytest

from tests.faults.cell import wait_until
from tests.faults.conftest import Load, assert_exact, once
from tests.faults.proxy import Action

TOKENS = 40


def kill_at(cell, tag, number):
    """Kill whichever worker the `number`-th message of that name belongs to; the list of killed."""
    killed = []

    def kill(link):
        killed.append(cell.worker_of(link))
        killed[-1].kill()

    cell.worker_proxy.act(tag, Action.PASS, first=number, call=kill)
    return killed


def test_idle(cell, questions):
    cell.workers[0].kill()
    assert_exact(Load(questions).run(cell))


def test_one_that_leaves_is_no_loss(cell, questions):
    lost, left = map(cell.scheduler.said, ("process has ended", "worker has left"))
    leave = once(lambda answer: answer.tokens >= 5, cell.workers[0].leave)
    assert_exact(Load(questions).run(cell, leave))
    wait_until(lambda: cell.scheduler.said("worker has left") == left + 1)
    assert cell.scheduler.said("process has ended") == lost


@pytest.mark.parametrize("chunk", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4)), 2])
def test_at_a_chunk_of_a_prompt(cell, questions, chunk):
    killed = kill_at(cell, "Plan", chunk)
    assert_exact(Load(questions, prompt=150, tokens=4, stream=False).run(cell))
    assert len(killed) == 1


@pytest.mark.parametrize("tokens", [1, TOKENS // 2, TOKENS - 1])
def test_between_tokens(cell, questions, tokens):
    """The one that computes what this client reads, and the other too."""
    watch = once(lambda answer: answer.tokens >= tokens, cell.workers[tokens % 2].kill)
    assert_exact(Load(questions, tokens=TOKENS).run(cell, watch))
    assert watch.struck


def test_one_prompt_with_every_adapter(cell, questions):
    """Whose streams begin with other tokens each, though prompt and seed are the same."""
    load = Load(questions, prompt=70, tokens=TOKENS, forms=["seeded"])
    (asked,) = load.questions
    names = enumerate([None, "one", "two"])
    load.questions = [replace(asked, adapter=number, name=name) for number, name in names]
    watch = once(lambda answer: answer.tokens >= 10, cell.workers[0].kill)
    answers = [*load.run(cell, watch), *load.run(cell)]
    assert_exact(answers)
    assert watch.struck
    assert len({tuple(answer.choices[0][:10]) for answer in answers}) == 3


def test_before_a_result_arrives(cell, questions):
    killed = kill_at(cell, "Result", 10)
    assert_exact(Load(questions).run(cell))
    assert len(killed) == 1


def test_twice_in_a_row_until_none_is_left(cell, questions):
    first = once(lambda answer: answer.tokens >= 10, cell.workers[0].kill)
    second = once(lambda answer: answer.tokens >= 15, cell.workers[1].kill)
    back = once(lambda answer: bool(second.struck), lambda: cell.workers[0].restart())

    def watch(answer):
        first(answer)
        second(answer)
        back(answer)

    assert_exact(Load(questions).run(cell, watch))
    assert first.struck
    assert second.struck
    assert back.struck
