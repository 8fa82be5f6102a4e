"""What one body may ask for in all: a little less than too much is taken, too much is a 400."""

import json
from typing import Any

import pytest

from pagefleet_gateway.bodies.bounds import MAX_KEPT
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.requests.generation import Generation, Limits
from pagefleet_gateway.requests.understanding import understand_chat, understand_completion
from tests.unit.gateway.served import echo_model


def completion(**fields: Any) -> Generation:
    limits = Limits(max_model_len=4096)
    return understand_completion(json.dumps(fields).encode(), echo_model(), limits)


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt_logprobs", {"prompt_logprobs": 20}),
        ("prompt_logprobs", {"prompt_logprobs": 9, "n": 2}),
        ("logprobs", {"echo": True, "logprobs": 20}),
    ],
)
def test_an_answer_shows_a_million_logprobs_of_prompts_at_most(
    field: str, fields: dict[str, Any]
) -> None:
    prompts = [[7] * 80] * 800
    completion(prompt=prompts[:300], **fields)
    assert refusal(prompt=prompts, **fields).param == field


@pytest.mark.parametrize(
    ("field", "fields"),
    [("n", {"n": 4}), ("best_of", {"n": 1, "best_of": 4}), ("n", {"n": 4, "stream": True})],
)
def test_a_body_asks_for_some_thousand_choices_at_most(field: str, fields: dict[str, Any]) -> None:
    """16,000 in one body kept all others of its gateway waiting for half a second."""
    completion(prompt=["a"] * 500, **fields)
    assert refusal(prompt=["a"] * 600, **fields).param == field
    assert "600 prompts" in refusal(prompt=["a"] * 600, **fields).message


@pytest.mark.parametrize(
    ("field", "fields"),
    [("return_token_ids", {"return_token_ids": True}), ("echo", {"echo": True})],
)
def test_choices_repeat_a_few_megabytes_of_prompts_at_most(
    field: str, fields: dict[str, Any]
) -> None:
    """An answer of 455 MB to a body of 2 MB took 2 GB of a gateway, and 3.7 s of its loop."""
    prompts = [[7] * 4000] * 128
    completion(prompt=prompts[:16], n=16, **fields)
    completion(prompt=prompts, **fields)
    assert refusal(prompt=prompts, n=16, **fields).param == field


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("max_tokens", {"n": 2}),
        ("logprobs", {"logprobs": 3}),
        ("logprobs", {"n": 2, "logprobs": 0}),
    ],
)
def test_an_answer_in_one_body_is_bounded_and_a_stream_is_not(
    field: str, fields: dict[str, Any]
) -> None:
    """4,300,000 logprobs took 1.1 GB of a gateway, and nothing kept a body from more of them."""
    many = {"prompt": ["a"] * 800, "max_tokens": 4000, **fields}
    completion(**many | {"max_tokens": 800})
    completion(**many | {"stream": True})
    assert refusal(**many).param == field


def test_beams_come_at_once_in_a_stream_too() -> None:
    many = {"prompt": ["a"] * 800, "max_tokens": 4000, "use_beam_search": True, "stream": True}
    completion(**many | {"max_tokens": 800, "logprobs": 3})
    assert refusal(**many, logprobs=3).message.endswith("tokens of each; ask less.")


@pytest.mark.parametrize(
    ("prompts", "n", "ahead"), [(1, 1, 256), (1, 16, 256), (64, 4, 128), (128, 16, 16)]
)
def test_all_choices_of_a_stream_are_so_far_ahead_together(
    prompts: int, n: int, ahead: int
) -> None:
    """2,048 of them, each 256 tokens ahead, took 340 MB of a gateway for a client that slept."""
    asked = completion(prompt=["a"] * prompts, n=n, stream=True, max_tokens=400)
    assert {submit.window for submit in asked.submits} == {ahead}


def test_an_answer_whose_length_nobody_asked_for_is_as_long_as_one_body_may_be() -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    for fields, most in (({"n": 16}, MAX_KEPT // (16 * 21)), ({"n": 16, "stream": True}, 131_000)):
        body = json.dumps(chat | fields).encode()
        understood = understand_chat(body, echo_model(), Limits(max_model_len=131_072))
        assert most <= understood.params.max_tokens <= most + 72


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": [first + 4000 * "b" for first in "abcdefghijklm"]}},
        {"prediction": {"type": "content", "content": "b" * 12_000}},
    ],
)
def test_a_large_grammar_is_not_for_a_thousand_prompts(fields: dict[str, Any]) -> None:
    """Of 690 KB, with 1,024 prompts, it took 1.5 GB of the scheduler."""
    completion(prompt=["a"] * 500, **fields)
    error = refusal(prompt=["a"] * 1000, **fields)
    assert error.param == "prompt"
    assert "1000 prompts" in error.message
