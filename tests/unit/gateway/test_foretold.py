"""What appears of a prediction: counts that follow from the texts, and from nothing else."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_gateway.cell.link import News
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.rendering.foretold import Foretold, Prediction
from tests.unit.gateway.test_stream import answer_to, outputs, streamed, whole


def counts(prediction: str, answer: str) -> tuple[int, int]:
    foretold = Foretold(Prediction(list(prediction.encode())))
    foretold.push(answer.encode())
    return foretold.accepted, foretold.rejected


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("abcdef", "abcdef", (6, 0)),
        ("abcdef", "abc", (3, 3)),
        ("abcdef", "", (0, 6)),
        ("abcdef", "xyz", (0, 6)),
        ("abcdef", "abXdef", (5, 1)),  # one is replaced
        ("abcdef", "abXXcdef", (6, 0)),  # some are added
        ("abcdef", "abef", (4, 2)),  # some are left out
        ("abcdef", "Sure: cdef", (4, 2)),
        ("abcdef", "axcxe", (1, 5)),  # single ones that come by again are chance
        ("abab", "abababab", (4, 0)),  # each appears once
        ("ab-ab+", "ab+", (3, 3)),
        ("abcd", "bcXab", (3, 1)),  # found before where it was left
        ("a", "a", (1, 0)),
    ],
)
def test_tokens_of_a_prediction_appear_or_not(
    prediction: str, answer: str, expected: tuple[int, int]
) -> None:
    assert counts(prediction, answer) == expected


@given(st.text("abc", min_size=1), st.text("abc"), st.randoms(use_true_random=False))
def test_counts_do_not_depend_on_what_came_together(
    prediction: str, answer: str, draw: random.Random
) -> None:
    accepted, rejected = counts(prediction, answer)
    assert accepted + rejected == len(prediction)
    assert accepted <= min(len(answer), len(prediction))
    pieces = Foretold(Prediction(list(prediction.encode())))
    at = draw.randint(0, len(answer))
    pieces.push(answer[:at].encode())
    assert pieces.accepted <= accepted
    pieces.push(answer[at:].encode())
    assert (pieces.accepted, pieces.rejected) == (accepted, rejected)


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_usage_says_how_much_of_the_prediction_appeared(kind: str) -> None:
    fields: dict[str, Any] = {"prediction": {"type": "content", "content": "one two"}, "n": 2}

    def news(answer: Answer) -> list[News]:
        return [*outputs(answer, ["one", " two!"]), *outputs(answer, ["two"], index=1)]

    answer = answer_to(kind, **fields)
    usage = whole(answer, news(answer))["usage"]
    expected = {"accepted_prediction_tokens": 7 + 3, "rejected_prediction_tokens": 4}
    assert usage["completion_tokens_details"] == expected
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = answer_to(kind, **fields, **options)
    assert streamed(answer, news(answer))[-1]["usage"] == usage
    plain = answer_to(kind)
    assert "completion_tokens_details" not in whole(plain, outputs(plain, ["a"]))["usage"]


def test_counts_are_json_of_the_openai_api() -> None:
    from openai.types import CompletionUsage

    answer = answer_to("chat", prediction={"type": "content", "content": "ab"})
    usage = CompletionUsage.model_validate(whole(answer, outputs(answer, ["ab"]))["usage"])
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens == 2
    assert json.loads(usage.model_dump_json())["completion_tokens"] == 2
