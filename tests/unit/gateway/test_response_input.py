"""Bodies of /v1/responses: the chat that they mean, and what is refused, by its name there."""

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from pagefleet_gateway.bodies.response_body import ResponseBody
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.http.tokenizing import count_input
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.generation import Generation, Limits
from pagefleet_gateway.requests.response_input import understand_response
from pagefleet_gateway.requests.understanding import understand_chat
from pagefleet_gateway.sandbox.template import ChatTemplate
from pagefleet_gateway.text.chat_prompt import ChatPrompts
from tests.unit.gateway.served import echo_model

LIMITS = Limits(max_model_len=1000, request_id="it")
TEMPLATE = "{{ tools | tojson }}|{{ messages | tojson }}|{{ enable_thinking }}"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": CITY}
NOW = {"type": "function", "name": "time.now"}


def model() -> ServedModel:
    echo = echo_model()
    prompts = ChatPrompts(echo.tokenizer, ChatTemplate(TEMPLATE, {}), TEMPLATE)
    return replace(echo, chat_prompts=prompts, tool_call_parser="hermes")


def response(**fields: Any) -> Generation:
    body = json.dumps({"input": "hello", "seed": 7} | fields).encode()
    return understand_response(body, model(), LIMITS)


def chat(**fields: Any) -> Generation:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "seed": 7} | fields)
    return understand_chat(body.encode(), model(), LIMITS)


def turns(items: list[Any], **fields: Any) -> list[Any]:
    """The messages that the template is shown."""
    prompt = bytes(response(input=items, **fields).prompts[0]).decode()
    return list(json.loads(prompt.split("|")[1]))


def error_of(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        response(**fields)
    assert caught.value.status == 400
    return caught.value


SCHEMA = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_output_tokens": 5, "temperature": 0.5}, {"max_tokens": 5, "temperature": 0.5}),
    ({"top_k": 3, "min_p": 0.1, "stop": ["a"]}, {"top_k": 3, "min_p": 0.1, "stop": ["a"]}),
    (
        {"priority": 3, "cache_salt": "a", "timeout": 2},
        {"priority": 3, "cache_salt": "a", "timeout": 2},
    ),
    (
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 2},
    ),
    ({"text": {"format": {"type": "text"}}}, {}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ({"text": {"format": SCHEMA}}, {"response_format": FORMAT}),
    ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    (
        {"instructions": "Be brief."},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "hello"},
            ]
        },
    ),
    (
        {"reasoning": {"effort": "none", "summary": "auto"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    ({"text": {"format": None, "verbosity": "low"}}, {"response_format": None}),
    ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ({"stream": True}, {"stream": True}),
]


@pytest.mark.parametrize(("asked", "meant"), SAME)
def test_it_is_understood_as_the_chat_that_it_means(
    asked: dict[str, Any], meant: dict[str, Any]
) -> None:
    ours, theirs = response(**asked), chat(**meant)
    assert (ours.prompts, ours.logprobs, ours.stop) == (
        theirs.prompts,
        theirs.logprobs,
        theirs.stop,
    )
    assert [structs.replace(submit, request="") for submit in ours.submits] == [
        structs.replace(submit, request="") for submit in theirs.submits
    ]
    assert (ours.id, theirs.id) == ("resp_it", "chatcmpl-it")


TOOL_CHOICES: list[tuple[Any, list[str], Any]] = [
    (None, ["weather", "time.now"], "auto"),
    ("auto", ["weather", "time.now"], "auto"),
    ("required", ["weather", "time.now"], "required"),
    ("none", [], "none"),
    (
        {"type": "function", "name": "weather"},
        ["weather", "time.now"],
        {"type": "function", "function": {"name": "weather"}},
    ),
    (
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "weather"}],
        },
        ["weather"],
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "weather"}}],
            },
        },
    ),
]


@pytest.mark.parametrize(("choice", "shown", "meant"), TOOL_CHOICES)
@pytest.mark.parametrize("parallel", [True, False])
def test_tools_mean_those_of_a_chat(
    choice: Any, shown: list[str], meant: Any, parallel: bool
) -> None:
    ours = response(tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=parallel)
    known = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in (WEATHER, NOW)
        if tool["name"] in (shown or ["weather"])
    ]
    theirs = chat(tools=known, tool_choice=meant, parallel_tool_calls=parallel)
    assert ours.prompts == theirs.prompts
    assert ours.params.guide == theirs.params.guide
    assert (ours.message is None) == (theirs.message is None)
    if ours.message is not None and theirs.message is not None:
        assert ours.message.parallel == theirs.message.parallel
    names = json.loads(bytes(ours.prompts[0]).decode().split("|")[0])
    assert [tool["function"]["name"] for tool in names or []] == shown


def test_items_become_turns() -> None:
    part = {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    items = [
        {"type": None, "role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("How ", "warm?")]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "a",
            "name": "f",
            "arguments": '{"x": 1}',
        },
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{"},
        {"type": "function_call_output", "call_id": "a", "output": "21"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "input_text", "text": "22"}],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Well."}]},
        {"role": "assistant", "content": "It is warm."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No more."}]},
        {"role": "user", "content": "Thanks."},
    ]
    calls = [
        {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for id, arguments in (("a", {"x": 1}), ("b", "{"))
    ]
    assert turns(items, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "How warm?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "reasoning": "Hm.",
            "tool_calls": calls,
        },
        {"role": "tool", "content": "21", "tool_call_id": "a"},
        {"role": "tool", "content": "22", "tool_call_id": "b"},
        {
            "role": "assistant",
            "content": "It is warm.",
            "reasoning_content": "Well.",
            "reasoning": "Well.",
            "thinking": "Well.",
        },
        {"role": "assistant", "content": "No more."},
        {"role": "user", "content": "Thanks."},
    ]


def test_text_behind_a_call_belongs_to_its_turn() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "One. "}
    (turn,) = turns([said, call, {**said, "content": "Two."}])
    assert turn["content"] == "One. Two."
    assert len(turn["tool_calls"]) == 1
    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert turns([encrypted, {"role": "user", "content": "a"}]) == [
        {"role": "user", "content": "a"}
    ]


USER = {"role": "user", "content": "a"}
IMAGE = {"type": "input_image", "image_url": "http://a/b.png"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
    ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
    ({"conversation": {"id": "conv_1"}}, "conversation", "Send the earlier items"),
    ({"background": True}, "background", "nothing is stored"),
    ({"input": []}, "input", "length >= 1"),
    ({"input": 5}, "input", "Expected"),
    ({"input": [USER, {"role": "user", "content": [IMAGE]}]}, "input[1].content[0]", "only text"),
    (
        {"input": [{**USER, "content": [{"type": "input_file"}]}]},
        "input[0].content[0]",
        "only text",
    ),
    (
        {"input": [{**USER, "content": [{"type": "input_audio"}]}]},
        "input[0].content[0]",
        "only text",
    ),
    ({"input": [{**USER, "content": [{"type": "input_text"}]}]}, "input[0].content[0]", "text"),
    ({"input": [USER, {"type": "item_reference", "id": "a"}]}, "input[1]", "nothing is stored"),
    ({"input": [{"type": "web_search_call", "id": "a"}]}, "input[0]", "no built-in tools"),
    ({"input": [{"role": "user"}]}, "input[0]", "content is missing"),
    ({"input": [{"content": "a"}]}, "input[0]", "role is missing"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0]", "role"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0]", "arguments"),
    (
        {"input": [{"type": "function_call_output", "call_id": "a"}]},
        "input[0]",
        "output is missing",
    ),
    (
        {"input": [{"type": "function_call_output", "output": "a"}]},
        "input[0]",
        "call_id is missing",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": [IMAGE]}]},
        "input[0].output[0]",
        "only text",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools", "no built-in tools"),
    ({"tools": [WEATHER, {"type": "mcp", "server_label": "a"}]}, "tools", "no built-in tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "same name"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "x"}],
            },
        },
        "tool_choice",
        "'x'",
    ),
    ({"text": {"format": {"type": "json_schema"}}}, "text", "a name and a schema"),
    (
        {"text": {"format": {**SCHEMA, "schema": {"$ref": "#/nowhere"}}}},
        "text",
        "text.format.schema",
    ),
    (
        {"text": {"format": SCHEMA}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "text",
    ),
    ({"text": {"format": SCHEMA}, "min_tokens": 2}, "min_tokens", "text"),
    ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens asks for"),
    ({"input": "a" * 2000}, "input", "input has"),
    ({"top_logprobs": 2}, "top_logprobs", "message.output_text.logprobs"),
    ({"top_logprobs": 21}, "top_logprobs", "20"),
    ({"include": ["everything"]}, "include", "everything"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream"),
    ({"metadata": {"a": "b" * 513}}, "metadata", "length"),
    ({"metadata": {"a": 5}}, "metadata", "str"),
    ({"temperature": 3}, "temperature", "2"),
    ({"messages": [USER]}, "messages", "is input meant"),
    ({"max_tokens": 5}, "max_tokens", "is max_output_tokens meant"),
    ({"n": 2}, "n", "not supported here with this value"),
    ({"response_format": {"type": "text"}}, "response_format", "is text.format meant"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "is reasoning.effort meant"),
    ({"prompt": {"id": "a"}}, "prompt", "is input meant"),
    ({"max_output_token": 5}, "max_output_token", "is max_output_tokens meant"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_cannot_be_is_refused_by_its_name(
    fields: dict[str, Any], param: str, words: str
) -> None:
    error = error_of(**fields)
    assert error.param == param
    assert words in error.message


def test_what_changes_nothing_is_taken() -> None:
    generation = response(
        store=True,
        background=False,
        metadata={"a": "b"},
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        user="u",
        include=["reasoning.encrypted_content"],
        max_tool_calls=3,
        context_management=[{"type": "compaction"}],
        thinking={"type": "enabled"},
        n=1,
        text={"verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        zork=1,
    )
    assert generation.ignored == [
        *("max_tool_calls", "context_management", "thinking", "zork"),
        *("reasoning.summary", "text.verbosity"),
    ]
    assert isinstance(generation.asked, ResponseBody)
    assert generation.asked.metadata == {"a": "b"}
    unread = understand_response(
        b'{"input": "a", "reasoning": {"effort": "low"}}', echo_model(), LIMITS
    )
    assert unread.ignored == ["reasoning.effort"]
    content = b'{"input": "a", "reasoning": {"effort": "low"}, "zork": 1}'
    assert count_input(content, echo_model(), 10)[1] == ["zork", "reasoning.effort"]


def test_fields_of_responses_are_no_fields_of_chats() -> None:
    for name, value in (("input", "a"), ("instructions", "b"), ("text", {})):
        with pytest.raises(ApiError, match="is no field of this route"):
            chat(**{name: value})
    with pytest.raises(ApiError, match="previous_response_id is not supported"):
        chat(previous_response_id="resp_1")
    ignored = {"metadata": {"a": "b"}, "store": True, "include": [], "truncation": "auto"}
    assert chat(**ignored).ignored == [*ignored]


def test_the_oldest_turns_are_left_out_where_there_is_no_room() -> None:
    opening, turns = [{"role": "developer", "content": "Be brief."}], []
    for number in range(9):
        call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "a", "output": "x" * (number * 9 % 50)}
        turns.append([{"role": "user", "content": f"question {number}"}, call, output])

    def prompt(kept: list[Any], room: int, **fields: Any) -> list[int]:
        items = opening + [item for turn in kept for item in turn]
        body = json.dumps({"input": items, "max_output_tokens": 10} | fields).encode()
        return understand_response(body, model(), Limits(room + 10)).prompts[0]

    newest = [prompt(turns[dropped:], 4000) for dropped in range(9)]
    for room in (4000, *(len(each) + more for each in newest for more in (0, 1))):
        fits = next(each for each in newest if len(each) <= room)
        assert prompt(turns, room, truncation="auto") == fits
    kept = prompt(turns, 1990, truncation="auto", max_output_tokens=None)
    assert kept == next(each for each in newest if len(each) <= 1500)
    for room, truncation in ((len(newest[-1]) - 1, "auto"), (len(newest[0]) - 1, "disabled")):
        with pytest.raises(ApiError) as caught:
            prompt(turns, room, truncation=truncation)
        assert caught.value.code == "context_length_exceeded"
