"""The judge of the fault tests and of the chaos benchmark: it must see every kind of wrong."""

import json
import random
from collections import Counter

import pytest

from benchmarks.drill.injuries import Injury
from benchmarks.drill.questions import SAMPLED, Questioner
from benchmarks.drill.streams import EXACT, LOST, REFUSED, REPEATED, WRONG, Answer
from benchmarks.drill.timeline import timeline
from benchmarks.drill.verdict import FOUND_DEAD, Verdict, quantile
from pagefleet_worker.prepare import prepare

TOKENS = 20


@pytest.fixture(scope="module")
def questioner(tmp_path_factory):
    seed = random.randrange(2**32)
    print("questions of seed", seed)
    return Questioner(prepare("echo", tmp_path_factory.mktemp("cache")), seed)


def answer(question, choices, *, whole=True, pieces=5):
    """What came of a question whose choices were sent in a few pieces each."""
    got = Answer(question)
    for index, tokens in enumerate(choices):
        size = max(1, len(tokens) // pieces)
        for at in range(0, len(tokens), size):
            choice = {"index": index, "token_ids": tokens[at : at + size]}
            got.add(json.dumps({"choices": [choice]}).encode())
    if whole:
        got.add(b"[DONE]")
    return got


@pytest.mark.parametrize("form", SAMPLED)
def test_what_has_to_come_is_exact(questioner, form):
    question = questioner.ask(form, 10, TOKENS)
    assert answer(question, question.expected).verdict == EXACT
    assert all(len(tokens) == TOKENS for tokens in question.expected)


def test_every_other_answer_is_told_apart(questioner):
    question = questioner.ask("seeded", 10, TOKENS)
    (right,) = question.expected
    at = random.randrange(5, TOKENS)
    new = next(token for token in range(256) if token not in right)
    changed = [*right[:at], new, *right[at + 1 :]]
    assert answer(question, [changed]).verdict == WRONG
    assert answer(question, [right[:at] + right[at - 5 :]]).verdict == REPEATED
    assert answer(question, [right + right[-5:]]).verdict == REPEATED
    assert answer(question, [right[:at]]).verdict == LOST
    assert answer(question, [right], whole=False).verdict == LOST
    refused = Answer(question)
    refused.error = "HTTP 503: too many"
    assert refused.verdict == REFUSED


def test_an_error_in_a_stream_is_a_loss(questioner):
    question = questioner.ask("greedy", 10, TOKENS)
    got = answer(question, [question.expected[0][:5]], whole=False)
    got.add(b'{"error": {"message": "no"}}')
    got.add(b"[DONE]")
    assert got.verdict == LOST


def verdict(answers, injuries=(), lines=(), blocks=0):
    return Verdict(
        calm=0,
        began=10,
        ended=20,
        answers=answers,
        injuries=list(injuries),
        lines=list(lines),
        resumed=0,
        reconnects=0,
        blocks={"used": blocks},
        descriptors=Counter(),
        idle=True,
    )


def test_a_verdict_fails_by_one_stream_or_one_block(questioner):
    question = questioner.ask("greedy", 10, TOKENS)
    exact = answer(question, question.expected)
    assert not verdict([exact]).failed
    assert verdict([exact], blocks=1).failed
    assert verdict([exact, answer(question, [question.expected[0][:3]])]).failed


def test_waits_are_those_of_the_slowest_stream(questioner):
    question = questioner.ask("greedy", 10, TOKENS)
    first, second = (answer(question, question.expected, pieces=4) for _ in range(2))
    first.asked, first.times = 11.0, [11.0, 12.0, 13.0, 14.0]
    second.asked, second.times = 11.0, [11.0, 12.0, 15.5, 16.0]
    died = Injury(12.5, "worker", 1, None)
    result = verdict([first, second], [died], [(12.53, f"scheduler | {FOUND_DEAD}")])
    assert result.recoveries == [3.0]
    assert result.detections == [pytest.approx(0.03)]
    assert result.goodput(10, 20) == pytest.approx(2 * TOKENS / 10)
    assert second.longest_gap == 3.5
    assert "| lost | 0 |" in result.table()
    assert timeline(result).count("<line") == 1


def test_quantiles_are_values_that_occurred():
    values = random.sample(range(1000), 101)
    assert quantile(values, 0.5) == sorted(values)[50]
    assert quantile(values, 1.0) == max(values)
