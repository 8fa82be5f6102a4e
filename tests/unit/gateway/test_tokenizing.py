"""/tokenize and /detokenize: the ids of what is sent, and back."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.http.tokenizing import (
    Detokenized,
    InputTokens,
    Tokenized,
    count_input,
    detokenize,
    tokenize,
)
from pagefleet_gateway.requests.generation import Limits
from pagefleet_gateway.requests.response_input import understand_response
from pagefleet_gateway.requests.understanding import understand_chat
from pagefleet_gateway.sandbox.template import ChatTemplate
from pagefleet_gateway.text.chat_prompt import ChatPrompts
from tests.unit.gateway.served import echo_model

HELLO = [{"role": "user", "content": "hello"}]
LONGEST = 100


def tokenized(**fields: Any) -> Tokenized:
    return tokenize(json.dumps(fields).encode(), echo_model(), LONGEST)[0]


def detokenized(**fields: Any) -> Detokenized:
    return detokenize(json.dumps(fields).encode(), echo_model(), LONGEST)[0]


def test_a_prompt() -> None:
    assert tokenized(prompt="hi", model="echo") == Tokenized(2, LONGEST, [104, 105])
    strings = tokenized(prompt="é h", return_token_strs=True).token_strs
    assert strings == ["Ã", "©", "Ġ", "h"]
    assert tokenized(prompt="") == Tokenized(0, LONGEST, [])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {
            "messages": [*HELLO, {"role": "assistant", "content": "a"}],
            "continue_final_message": True,
        },
        {"reasoning_effort": "low"},
        {"thinking": {"type": "disabled"}},
        {"enable_thinking": True},
        {"chat_template_kwargs": {"reasoning_effort": "a"}},
        {"documents": [{"text": "a"}]},
    ],
)
def test_a_conversation_has_the_ids_that_a_chat_has(fields: dict[str, Any]) -> None:
    """By a template that shows all that may shape a prompt."""
    source = (
        "{{ documents }}{{ enable_thinking }}{{ thinking }}{{ reasoning_effort }}"
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ add_generation_prompt }}"
    )
    echo = echo_model()
    prompts = ChatPrompts(echo.tokenizer, ChatTemplate(source, {}), source)
    body = json.dumps({"messages": HELLO} | fields).encode()
    model = replace(echo, chat_prompts=prompts)
    chat = understand_chat(body, model, Limits(LONGEST))
    assert tokenize(body, model, LONGEST)[0].tokens == chat.prompts[0]


def test_tools_that_the_template_does_not_know_change_nothing() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert tokenized(messages=HELLO, tools=tools) == tokenized(messages=HELLO)
    with pytest.raises(ApiError) as caught:
        tokenized(messages=HELLO, tools=tools * 2)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hello"},
        {"input": [*HELLO, {"role": "assistant", "content": "hi"}], "instructions": "Be brief."},
        {"input": "hello", "max_output_tokens": 5, "stream": True},
    ],
)
def test_the_input_of_a_response_has_the_tokens_of_its_prompt(fields: dict[str, Any]) -> None:
    content = json.dumps(fields).encode()
    response = understand_response(content, echo_model(), Limits(LONGEST))
    counted, ignored = count_input(content, echo_model(), LONGEST)
    assert (counted, ignored) == (InputTokens(len(response.prompts[0])), [])


def test_the_input_of_a_response_is_counted_where_there_is_no_room_for_it() -> None:
    content = json.dumps({"input": "a" * LONGEST, "zork": 1}).encode()
    counted, ignored = count_input(content, echo_model(), LONGEST)
    assert counted.input_tokens > LONGEST
    assert ignored == ["zork"]


def test_the_input_of_a_response_is_refused_as_the_response_is() -> None:
    for fields, param in (
        ({}, "input"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "model": "other"}, "model"),
    ):
        with pytest.raises(ApiError) as caught:
            count_input(json.dumps(fields).encode(), echo_model(), LONGEST)
        assert caught.value.param == param


@given(text=st.text(max_size=40))
def test_there_and_back(text: str) -> None:
    tokens = tokenized(prompt=text).tokens
    assert detokenized(tokens=tokens).prompt == text


def test_special_tokens_are_text() -> None:
    tokens = tokenized(messages=HELLO).tokens
    text = detokenized(tokens=tokens).prompt
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": HELLO}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"prompt": "a", "return_token_str": True}, "return_token_str"),
        ({"prompt": "a", "model": "other"}, "model"),
    ],
)
def test_what_is_wrong_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        tokenized(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("tokens", [None, "a", [-1], [10**6], [2**40], [1.5]])
def test_what_are_no_tokens(tokens: Any) -> None:
    with pytest.raises(ApiError) as caught:
        detokenized(tokens=tokens)
    assert (caught.value.status, caught.value.param) == (400, "tokens")
