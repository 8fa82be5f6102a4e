"""Conversations as chat templates are shown them."""

import json
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest

from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.generation import Generation, Limits
from pagefleet_gateway.requests.understanding import understand_chat
from pagefleet_gateway.sandbox.template import ChatTemplate
from pagefleet_gateway.text.chat_prompt import ChatPrompts
from tests.unit.gateway.served import echo_model

MESSAGES = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]


def served(template: str) -> ServedModel:
    echo = echo_model()
    return replace(
        echo, chat_prompts=ChatPrompts(echo.tokenizer, ChatTemplate(template, {}), template)
    )


def chat(template: str, **fields: Any) -> Generation:
    body = json.dumps({"messages": HELLO} | fields).encode()
    return understand_chat(body, served(template), Limits(max_model_len=100_000))


def shown(template: str, **fields: Any) -> str:
    """The prompt's text."""
    return bytes(chat(template, **fields).prompts[0]).decode()


def test_a_developer_is_the_system_of_templates_that_know_none() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    silent = "{% for m in messages if m.role in ('user', 'system') %}{{ m.content }};{% endfor %}"
    assert shown(silent, messages=messages) == "Be brief.;hello;"
    assert shown(MESSAGES, messages=messages) == "system=Be brief.;user=hello;"
    knows = MESSAGES + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert shown(knows, messages=messages) == "developer=Be brief.;user=hello;!"


@pytest.mark.parametrize(
    "said",
    [
        {"content": None, "refusal": "I will not."},
        {"content": "I will not.", "refusal": None},
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "will not."}]},
    ],
)
def test_what_an_assistant_refused_is_what_it_said(said: dict[str, Any]) -> None:
    messages = [*HELLO, {"role": "assistant"} | said, *HELLO]
    assert shown(MESSAGES, messages=messages) == "user=hello;assistant=I will not.;user=hello;"


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "assistant"])
def test_who_says_nothing_is_named(role: str) -> None:
    for said in ({}, {"content": None}, {"content": None, "tool_calls": []}, {"refusal": None}):
        with pytest.raises(ApiError, match=r"messages\[1\].content is missing") as caught:
            shown(MESSAGES, messages=[*HELLO, {"role": role} | said])
        assert caught.value.param == "messages"


SWITCHED = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"reasoning_effort": "none"}, "False False none"),
        ({"reasoning_effort": "minimal"}, "True True minimal"),
        ({"reasoning_effort": "high"}, "True True high"),
        ({"reasoning_effort": None}, "  "),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}},
            "True False high",
        ),
        ({"thinking": {"type": "enabled"}}, "True True "),
        ({"thinking": {"type": "disabled", "clear_thinking": True}}, "False False none"),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "low"}, "True True low"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "False False none"),
        ({"thinking": True, "reasoning_effort": None}, "True True "),
        ({"thinking": False}, "False False none"),
        ({"enable_thinking": True}, "True True "),
        ({"enable_thinking": False, "reasoning_effort": "max"}, "False False none"),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "True True "),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"reasoning_effort": "low"}},
            "False False low",
        ),
    ],
)
def test_effort_reaches_templates_that_can_tell_it(asked: dict[str, Any], told: str) -> None:
    assert shown(SWITCHED, **asked) == told
    assert chat(SWITCHED, **asked).ignored == []


def test_what_nobody_heeds_is_named() -> None:
    options = {
        "reasoning_effort": "low",
        "thinking": {"type": "enabled"},
        "enable_thinking": True,
        "verbosity": "high",
        "reasoning": {"effort": "low"},
        "thinking_budget": 100,
        "zork": 1,
    }
    assert sorted(chat(MESSAGES, **options).ignored) == sorted(options)
    assert shown(MESSAGES, **options) == shown(MESSAGES)
    switches = {"enable_thinking": False, "preserve_thinking": True}
    asked = {"chat_template_kwargs": switches, "thinking": {"type": "enabled", "budget_tokens": 9}}
    assert chat(MESSAGES + "{{ enable_thinking }}", **asked).ignored == [
        *("thinking.budget_tokens", "chat_template_kwargs.preserve_thinking"),
    ]
    for name in ("reasoning_effort", "verbosity"):
        with pytest.raises(ApiError, match="is not acceptable") as caught:
            chat(MESSAGES, **{name: "extreme"})
        assert caught.value.param == name


def nested(depth: int) -> dict[str, Any]:
    """Objects within objects."""
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def called(arguments: str) -> list[dict[str, Any]]:
    """A conversation in which a tool was called."""
    function = {"name": "f", "arguments": arguments}
    return [*HELLO, {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]


ARGUMENTS = [
    *('{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', '{"a": "\\ud800"}', "{", "[1]", "null"),
    *('{"a": ' + "9" * 5000 + "}", "[" * 2000, '{"a": ' * 2000, "\0", "{} {}", "\U0001f600"),
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str) -> None:
    """By a template in a process of its own, which they have to reach."""
    template = "{{ messages[1].tool_calls[0].function.arguments }}"
    assert shown(template, messages=called(arguments)) == arguments
    body = json.dumps({"messages": called(arguments)}).encode()
    assert understand_chat(body, echo_model(), Limits(max_model_len=100_000)).prompts[0]


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**400])
def test_numbers_of_any_size_reach_the_template(number: int) -> None:
    parameters = {"type": "object", "properties": {"a": {"maximum": number}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    served = replace(echo_model(), tool_call_parser="hermes")
    for fields in (
        {"messages": called(json.dumps({"a": number}))},
        {"messages": HELLO, "tools": tools},
        {"messages": HELLO, "chat_template_kwargs": {"thinking": number}},
    ):
        body = json.dumps(fields).encode()
        assert understand_chat(body, served, Limits(max_model_len=1000)).prompts[0]


@pytest.mark.parametrize("depth", [10, 200, 500, 700, 900])
def test_what_is_nested_too_deeply_is_refused(depth: int) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": nested(depth)}}]
    served = replace(echo_model(), tool_call_parser="hermes")
    for fields in (
        {"messages": called(json.dumps(nested(depth)))},
        {"messages": HELLO, "tools": tools},
        {"messages": HELLO, "chat_template_kwargs": {"thinking": nested(depth)}},
    ):
        with suppress(ApiError) if depth > 100 else nullcontext():
            body = json.dumps(fields).encode()
            assert understand_chat(body, served, Limits(max_model_len=100_000)).prompts[0]
