"""Bodies of /v1/messages: the chat that they mean, and what is refused, by its name there."""

import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.http.tokenizing import count_message
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.generation import Generation, Limits
from pagefleet_gateway.requests.messages_input import understand_message
from pagefleet_gateway.requests.understanding import understand_chat
from pagefleet_gateway.sandbox.template import ChatTemplate
from pagefleet_gateway.text.chat_prompt import ChatPrompts
from tests.unit.gateway.served import echo_model

LIMITS = Limits(max_model_len=4000, request_id="it")
TEMPLATE = (
    "{{ tools | tojson }}|{{ messages | tojson }}|{{ enable_thinking }} {{ reasoning_effort }}"
)
USER = {"role": "user", "content": "hello"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": CITY}
NOW = {"type": "custom", "name": "time.now", "input_schema": {"type": "object"}}


def model() -> ServedModel:
    echo = echo_model()
    prompts = ChatPrompts(echo.tokenizer, ChatTemplate(TEMPLATE, {}), TEMPLATE)
    return replace(echo, chat_prompts=prompts, tool_call_parser="hermes")


def body(fields: dict[str, Any]) -> bytes:
    return json.dumps({"messages": [USER], "seed": 7, "max_tokens": 5} | fields).encode()


def message(limits: Limits = LIMITS, **fields: Any) -> Generation:
    return understand_message(body(fields), model(), limits)


def chat(**fields: Any) -> Generation:
    return understand_chat(body(fields), model(), LIMITS)


def turns(messages: list[Any], **fields: Any) -> list[Any]:
    """The messages that the template is shown."""
    prompt = bytes(message(messages=messages, **fields).prompts[0]).decode()
    return list(json.loads(prompt.split("|")[1]))


SCHEMA = {"type": "json_schema", "schema": CITY}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
THINKS = {"enable_thinking": True, "thinking": True}
SYSTEM = {"role": "system", "content": "Be brief."}
CACHED = {"type": "ephemeral", "ttl": "1h"}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"temperature": 0.5, "top_p": 0.5}, {"temperature": 0.5, "top_p": 0.5}),
    ({"top_k": 3, "min_p": 0.1}, {"top_k": 3, "min_p": 0.1}),
    ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"priority": 3, "timeout": 2}, {"priority": 3, "timeout": 2}),
    ({"cache_salt": "a"}, {"cache_salt": "a"}),
    ({"stream": True}, {"stream": True}),
    ({"output_config": {"format": SCHEMA}}, {"response_format": FORMAT}),
    ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    ({"system": "Be brief."}, {"messages": [SYSTEM, USER]}),
    (
        {
            "system": [
                {"type": "text", "text": "Be ", "cache_control": CACHED},
                {"type": "text", "text": "brief."},
            ]
        },
        {"messages": [SYSTEM, USER]},
    ),
    ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
    (
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
        {"reasoning_effort": "none"},
    ),
    ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": THINKS}),
    (
        {
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "output_config": {"effort": "low"},
        },
        {"chat_template_kwargs": THINKS, "reasoning_effort": "low"},
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": "Well"}]},
        {
            "messages": [USER, {"role": "assistant", "content": "Well"}],
            "continue_final_message": True,
        },
    ),
    (
        {
            "cache_control": CACHED,
            "metadata": {"user_id": "me"},
            "service_tier": "auto",
            "thinking": None,
        },
        {},
    ),
]


@pytest.mark.parametrize(("asked", "meant"), SAME)
def test_it_is_understood_as_the_chat_that_it_means(
    asked: dict[str, Any], meant: dict[str, Any]
) -> None:
    ours, theirs = message(**asked), chat(**meant)
    assert (ours.prompts, ours.stop, ours.logprobs) == (theirs.prompts, theirs.stop, None)
    assert [structs.replace(submit, request="") for submit in ours.submits] == [
        structs.replace(submit, request="") for submit in theirs.submits
    ]
    assert (ours.id, theirs.id) == ("msg_it", "chatcmpl-it")
    assert ours.continues_prompt == theirs.continues_prompt


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOL_CHOICES: list[tuple[Any, Any, bool]] = [
    (None, None, True),
    ({"type": "auto"}, "auto", True),
    ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
    ({"type": "any"}, "required", True),
    ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
    ({"type": "none"}, "none", True),
    ({"type": "tool", "name": "weather"}, named("weather"), True),
]


@pytest.mark.parametrize(("choice", "meant", "parallel"), TOOL_CHOICES)
@pytest.mark.parametrize("strict", [False, True])
def test_tools_mean_those_of_a_chat(choice: Any, meant: Any, parallel: bool, strict: bool) -> None:
    ours = message(tools=[WEATHER | {"strict": strict}, NOW], tool_choice=choice)
    weather = {"name": "weather", "description": "Of a city.", "parameters": CITY}
    now = {"name": "time.now", "parameters": {"type": "object"}}
    functions = [weather | {"strict": strict}, now]
    tools = [{"type": "function", "function": function} for function in functions]
    theirs = chat(tools=tools, tool_choice=meant, parallel_tool_calls=parallel)
    assert ours.prompts == theirs.prompts
    assert ours.params.guide == theirs.params.guide
    assert (ours.message is None) == (theirs.message is None)
    if ours.message is not None and theirs.message is not None:
        assert ours.message.parallel == theirs.message.parallel


def use(id: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "f", "input": given}


def result(id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "citations": None}


def called(id: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_blocks_become_messages() -> None:
    asked = [
        {"role": "user", "content": [text("How "), text("warm?")]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                text("Let me see."),
                use("a", x=1) | {"caller": {"type": "direct"}},
                use("b", INVALID_JSON='{"x'),
            ],
        },
        {
            "role": "user",
            "content": [
                result("a", "21", cache_control=CACHED),
                result("b", [text("no "), text("JSON")], is_error=True),
                text("Go on."),
            ],
        },
        {"role": "assistant", "content": [use("c"), use("d", INVALID_JSON="x", y=2)]},
        {
            "role": "user",
            "content": [
                text("So:"),
                result("c"),
                result("d", "Error: no.", is_error=True),
            ],
        },
        {"role": "assistant", "content": "It is warm."},
        {"role": "user", "content": "Thanks."},
    ]
    assert turns(asked, system="Be brief.") == [
        SYSTEM,
        {"role": "user", "content": "How warm?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "reasoning": "Hm.",
            "tool_calls": [called("a", {"x": 1}), called("b", '{"x')],
        },
        {"role": "tool", "content": "21", "tool_call_id": "a"},
        {"role": "tool", "content": "Error: no JSON", "tool_call_id": "b"},
        {"role": "user", "content": "Go on."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [called("c", {}), called("d", {"INVALID_JSON": "x", "y": 2})],
        },
        {"role": "user", "content": "So:"},
        {"role": "tool", "content": "", "tool_call_id": "c"},
        {"role": "tool", "content": "Error: no.", "tool_call_id": "d"},
        {"role": "assistant", "content": "It is warm."},
        {"role": "user", "content": "Thanks."},
    ]


def test_turns_of_one_role_are_one() -> None:
    asked = [
        {"role": "system", "content": [text("First.")]},
        {"role": "user", "content": "One."},
        {"role": "user", "content": []},
        {"role": "user", "content": [text("Two")]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm. ", "signature": None}, text("a")],
        },
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "So."}, use("a")]},
        {"role": "user", "content": [result("a", "1")]},
        {"role": "user", "content": "Three."},
        {"role": "system", "content": "Last."},
    ]
    assert turns(asked, system="Be brief.") == [
        {"role": "system", "content": "Be brief.\n\nFirst."},
        {"role": "user", "content": "One.\n\nTwo"},
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "Hm. So.",
            "reasoning": "Hm. So.",
            "tool_calls": [called("a", {})],
        },
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "user", "content": "Three."},
        {"role": "system", "content": "Last."},
    ]
    assert turns([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]


def test_what_is_another_with_every_request_is_left_out() -> None:
    attribution = text("x-anthropic-billing-header: cc_version=2; cch=1f3;")
    assert turns([USER], system=[attribution, text("Be brief.")]) == [SYSTEM, USER]
    assert turns([USER], system=[attribution]) == [USER]
    said = {"role": "user", "content": [attribution]}
    assert turns([said])[0]["content"] == attribution["text"]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "Expected `int`"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": [{"role": "user"}]}, "messages", "content"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages", "'tool'"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "'image'; only parts of"),
    (
        {"messages": [{"role": "user", "content": [result("a", [IMAGE])]}]},
        "messages",
        "'image'; only parts of type text",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages", "only parts"),
    (
        {"messages": [USER, {"role": "user", "content": [text("a"), use("a")]}]},
        "messages[1].content[1]",
        "is a tool_use, which no turn of the user has",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": [result("a")]}]},
        "messages[1].content[0]",
        "is a tool_result, which no turn of the assistant has",
    ),
    (
        {"messages": [USER, {"role": "system", "content": [use("a")]}]},
        "messages[1].content[0]",
        "which no turn of the system has",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": [use("a")]}]},
        "messages[1]",
        "must follow, as tool_result",
    ),
    ({"messages": [{"role": "system", "content": ""}]}, "messages", "says nothing"),
    ({"messages": [{"role": "system", "content": []}], "system": ""}, "messages", "says nothing"),
    ({"system": [IMAGE]}, "system", "'image'"),
    ({"system": [{"text": "a"}]}, "system", "type"),
    (
        {"messages": [{"role": "user", "content": [result("a", [{"text": "b"}])]}]},
        "messages",
        "content[0].content[0].type",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "no built-in"),
    ({"tools": [{"name": "a"}]}, "tools", "input_schema"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "same name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice", "name is missing"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}},
        "tool_choice",
        "'x', which is not in tools",
    ),
    ({"tool_choice": "auto"}, "tool_choice", "Expected `object | null`"),
    ({"thinking": {"type": "always"}}, "thinking", "'always'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config", "schema"),
    (
        {"output_config": {"format": {**SCHEMA, "schema": {"$ref": "#/nowhere"}}}},
        "output_config",
        "output_config.format.schema",
    ),
    ({"stop_sequences": "a"}, "stop_sequences", "Expected `array"),
    ({"stop_sequences": [""]}, "stop_sequences", "length >= 1"),
    ({"temperature": 3}, "temperature", "2"),
    ({"service_tier": "gold"}, "service_tier", "'gold'"),
    ({"stop": ["a"]}, "stop", "is stop_sequences meant"),
    ({"n": 2}, "n", "not supported here with this value"),
    ({"max_output_tokens": 2}, "max_output_tokens", "is max_tokens meant"),
    ({"instructions": "a"}, "instructions", "is system meant"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "is output_config.effort meant"),
    ({"max_token": 5}, "max_token", "is max_tokens meant"),
    ({"container": "a"}, "container", "not supported"),
    ({"compaction": {"instructions": "a"}}, "compaction", "not supported"),
    ({"thread": {"type": "create"}}, "thread", "nothing is stored"),
    ({"thread": {"type": "continue", "previous_message_id": "a"}}, "thread", "all that was said"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "not supported"),
    ({"output_format": SCHEMA}, "output_format", "is output_config.format meant"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_cannot_be_is_refused_by_its_name(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        message(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


def test_a_length_is_asked_for() -> None:
    with pytest.raises(ApiError, match="max_tokens"):
        understand_message(json.dumps({"messages": [USER]}).encode(), model(), LIMITS)


def test_what_changes_nothing_is_taken_and_named() -> None:
    generation = message(
        thinking={"type": "enabled", "budget_tokens": 1024},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        inference_geo="eu",
        speed="fast",
        diagnostics={"previous_message_id": None},
        mcp_servers=[],
        zork=1,
    )
    assert generation.ignored == [
        *("inference_geo", "speed", "diagnostics", "zork"),
        *("context_management", "thinking.budget_tokens"),
    ]
    fields = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    unread = understand_message(body(fields), echo_model(), LIMITS)
    assert unread.ignored == ["output_config.effort", "thinking"]
    fields["context_management"] = {}
    content = json.dumps({"messages": [USER]} | fields).encode()
    assert count_message(content, echo_model(), 10)[1] == ["context_management", *unread.ignored]


def test_thoughts_may_be_left_out() -> None:
    thinks = replace(model(), reasoning_parser="deepseek_r1")
    for display, shown in (("omitted", False), ("summarized", True), (None, True)):
        thinking = {"type": "adaptive", "display": display}
        generation = understand_message(body({"thinking": thinking}), thinks, LIMITS)
        assert generation.message is not None
        assert generation.message.shows_thoughts == shown


def test_an_answer_is_no_longer_than_there_is_room() -> None:
    prompt = len(message().prompts[0])
    for asked, given in ((3, 3), (10, 10), (11, 10), (10**6, 10)):
        generation = message(Limits(prompt + 10), max_tokens=asked)
        assert (generation.params.max_tokens, generation.shrinks) == (given, True)
    with pytest.raises(ApiError, match="leaves no room for an answer") as caught:
        message(Limits(prompt))
    assert caught.value.code == "context_length_exceeded"


COUNTED: list[dict[str, Any]] = [
    {},
    {"system": "Be brief.", "tools": [WEATHER], "thinking": {"type": "adaptive"}},
    {"tools": [WEATHER], "tool_choice": {"type": "none"}},
    {"messages": [USER, {"role": "assistant", "content": "Well"}]},
    {"messages": [USER, {"role": "assistant", "content": [use("a")]}, USER]},
]


@pytest.mark.parametrize("fields", COUNTED)
def test_what_is_counted_is_the_prompt(fields: dict[str, Any]) -> None:
    asked = {"messages": [USER], "model": "echo"} | fields
    counted, ignored = count_message(json.dumps(asked).encode(), model(), 10)
    assert (counted.input_tokens, ignored) == (len(message(**fields).prompts[0]), [])
    assert count_message(body(fields), model(), 10) == (counted, ["max_tokens"])
