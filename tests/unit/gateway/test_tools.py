"""Tools in chats: what the template sees, what is guaranteed, and what comes out."""

import json
import random
from array import array
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from msgspec import UNSET

from pagefleet.wire import Finish, Output, pack_ints
from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.rendering.completion_object import CompletionTokensDetails
from pagefleet_gateway.rendering.stream import Renderer
from pagefleet_gateway.requests.generation import Limits
from pagefleet_gateway.requests.understanding import understand_chat
from pagefleet_gateway.sandbox.template import ChatTemplate
from pagefleet_gateway.text.chat_prompt import ChatPrompts
from pagefleet_gateway.tool_parsers.notations import NOTATIONS
from pagefleet_worker.grammar import DisobeyedError, Grammars
from tests.byte_grammars import byte_grammars
from tests.schemas import random_schema
from tests.unit.gateway.served import echo_model

TEMPLATE = (
    "{{ tools | tojson }}|{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "({{ call.id }} {{ call.function.name }} {{ call.function.arguments.city }})"
    "{% endfor %}{{ m.tool_call_id or '' }};{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "unit": {"$ref": "#/$defs/unit"},
            },
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["C", "F"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "time.now"}}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
HELLO = [{"role": "user", "content": "hello"}]
GRAMMARS = byte_grammars(260, (256,))


def model(tools: str | None = "hermes", thoughts: str | None = None) -> ServedModel:
    echo = echo_model()
    template = ChatPrompts(echo.tokenizer, ChatTemplate(TEMPLATE, {}))
    return replace(echo, chat_prompts=template, tool_call_parser=tools, reasoning_parser=thoughts)


def chat(served: ServedModel | None = None, **fields: Any) -> Answer:
    served = served or model()
    body = json.dumps({"messages": HELLO, "tools": [WEATHER, NOW]} | fields).encode()
    return Answer(understand_chat(body, served, Limits(max_model_len=4096)), served)


def prompt_of(answer: Answer) -> str:
    return bytes(answer.generation.prompts[0]).decode()


def whole(answer: Answer, text: str, finish: Finish = Finish.STOP) -> dict[str, Any]:
    """The choice of the answer that is not streamed."""
    piece = take(answer, text, 0, finish)
    content = Renderer(answer, model()).whole({0: piece})
    choice: dict[str, Any] = json.loads(content)["choices"][0]
    return choice


def take(answer: Answer, text: str, position: int, finish: Finish | None) -> Piece:
    tokens = list(text.encode()) + ([257] if finish is Finish.STOP else [])
    request = answer.prompts[0].request
    return answer.take([Output(request, 1, 0, position, pack_ints(tokens), None, finish)])[0]


def streamed(answer: Answer, text: str, finish: Finish = Finish.STOP) -> dict[str, Any]:
    """The choice that a client puts together from the events of a stream."""
    renderer = Renderer(answer, model())
    content, position = renderer.start(), 0
    while position < len(text.encode()):
        length = random.randint(1, 9)
        cut = text.encode()[position : position + length].decode(errors="ignore")
        last = position + len(cut.encode()) >= len(text.encode())
        piece = take(answer, cut, position, finish if last else None)
        content += renderer.events({0: piece})
        position += len(cut.encode())
    return put_together(content)


def put_together(events: bytes) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "", "content": "", "calls": {}}
    message |= {"reasoning_content": "", "reasoning": ""}
    finish = None
    for line in events.decode().split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        finish = choice["finish_reason"] or finish
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] += value
                continue
            for call in value:
                known = message["calls"].setdefault(call["index"], {"arguments": ""})
                known["arguments"] += call["function"].get("arguments", "")
                for field in ("id", "type"):
                    if field in call:
                        assert field not in known
                        known[field] = call[field]
                if "name" in call["function"]:
                    known["name"] = call["function"]["name"]
    return {"message": message, "finish_reason": finish}


def same(stream: dict[str, Any], choice: dict[str, Any]) -> None:
    """What was streamed is what was not."""
    message, known = choice["message"], stream["message"]
    assert stream["finish_reason"] == choice["finish_reason"]
    assert known["content"] == (message["content"] or "")
    for name in ("reasoning_content", "reasoning"):
        assert known[name] == message.get(name, "")
    assert [
        {"id": call["id"], "type": call["type"], **call["function"]}
        for call in message.get("tool_calls", [])
    ] == [{**call} for _, call in sorted(known["calls"].items())]


TAGGED = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>{"name": "time.now", "arguments": {}}</tool_call>'
)


def test_calls_come_whole_and_in_pieces() -> None:
    choice = whole(chat(request_id="it"), TAGGED)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function"
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Zürich"}'}
    assert second["function"] == {"name": "time.now", "arguments": "{}"}
    assert first["id"] != second["id"]
    for _ in range(20):
        same(streamed(chat(request_id="it", stream=True), TAGGED), choice)


def test_bare_text_is_what_the_tools_take() -> None:
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\n5\n</parameter>\n"
        "<parameter=unit>\nC\n</parameter>\n<parameter=days>\n5\n</parameter>\n</function>\n</tool_call>"
    )
    served = model("qwen3_coder")
    choice = whole(chat(served, request_id="it"), text)
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "5", "unit": "C", "days": 5}
    same(streamed(chat(served, request_id="it", stream=True), text), choice)


MALFORMED = (
    'Hm.<tool_call>{"name": "weather", "arguments": {\'city\': \'Zürich}\'}}</tool_call>\n'
    '<tool_call>{"name": "time.now", "arguments": {"zone": [1}}</tool_call> Done.'
)


def test_malformed_arguments_are_the_clients_to_see() -> None:
    choice = whole(chat(request_id="it"), MALFORMED)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Hm.'}}Done."
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [
        {"name": "weather", "arguments": "{'city': 'Zürich}"},
        {"name": "time.now", "arguments": '{"zone": [1}}'},
    ]
    for _ in range(20):
        same(streamed(chat(request_id="it", stream=True), MALFORMED), choice)


def test_an_answer_without_a_call_is_content() -> None:
    choice = whole(chat(), "It is late.\n")
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "It is late.\n"
    assert "tool_calls" not in choice["message"]


def test_a_call_that_is_cut_off_says_so() -> None:
    choice = whole(chat(), TAGGED[:60], Finish.LENGTH)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("stop", "finish"), [("Zü", "stop"), ("</tool_call>", "tool_calls"), ("time", "tool_calls")]
)
def test_a_call_that_a_stop_string_cuts_is_none_to_carry_out(stop: str, finish: str) -> None:
    fields = {"stop": stop, "request_id": "it"}
    choice = whole(chat(**fields), TAGGED, Finish.LENGTH)
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish, stop)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    complete = call["function"]["arguments"] == '{"city": "Zürich"}'
    assert complete == (finish == "tool_calls")


def test_one_call_where_parallel_ones_are_unwanted() -> None:
    choice = whole(chat(parallel_tool_calls=False), TAGGED)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


def test_thoughts_content_and_calls() -> None:
    text = "<think>\nHm. <tool_call></think>" + TAGGED
    served = model(thoughts="qwen3")
    choice = whole(chat(served, request_id="it"), text)
    for name in ("reasoning_content", "reasoning"):
        assert choice["message"][name] == "\nHm. <tool_call>"
    assert choice["message"]["content"] == "Let me see."
    assert len(choice["message"]["tool_calls"]) == 2
    for _ in range(10):
        same(streamed(chat(served, request_id="it", stream=True), text), choice)


def test_tokens_of_thoughts_are_counted_however_they_came() -> None:
    text = "<think>Hm.</think>" + TAGGED
    counted = set()
    for _ in range(10):
        answer = chat(model(thoughts="qwen3"), stream=True, n=1)
        streamed(answer, text)
        counted.add(answer.usage.completion_tokens_details)
    assert counted == {CompletionTokensDetails(len(">Hm.</think>"))}
    assert chat().usage.completion_tokens_details is UNSET


@pytest.mark.parametrize("family", ["qwen3", "deepseek_r1"])
def test_the_prompt_says_whether_an_answer_begins_within_thoughts(family: str) -> None:
    def said(end: str, text: str, **fields: Any) -> tuple[Any, ...]:
        echo = model(thoughts=family)
        template = ChatTemplate("{{ messages[0].content }}" + end, {})
        served = replace(echo, chat_prompts=ChatPrompts(echo.tokenizer, template))
        message = whole(chat(served, tools=None, **fields), text)["message"]
        return message.get("reasoning"), message["content"]

    assert said("<think>\n", "Hm.</think>Yes.") == ("Hm.", "Yes.")
    assert said("<think>\n\n</think>\n\n", "Yes.") == (None, "Yes.")
    fields = {"continue_final_message": True}
    for begun, answer in (("I am", (None, " here.")), ("<think>I", (" here.", ""))):
        messages = [{"role": "assistant", "content": begun}]
        assert said("", " here.", messages=messages, **fields) == answer


def test_thoughts_that_nobody_wants_are_left_out() -> None:
    text = "<think>Hm.</think>" + TAGGED
    served, fields = model(thoughts="qwen3"), {"include_reasoning": False, "request_id": "it"}
    choice = whole(chat(served, **fields), text)
    assert choice["message"].keys() == {"role", "content", "refusal", "tool_calls"}
    assert choice["message"]["content"] == "Let me see."
    same(streamed(chat(served, stream=True, **fields), text), choice)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_the_template_sees_what_was_thought_by_either_name(name: str) -> None:
    echo = model()
    template = "{% for m in messages %}{{ m.reasoning }}{{ m.reasoning_content }}{% endfor %}"
    prompts = ChatPrompts(echo.tokenizer, ChatTemplate(template, {}))
    said = {"role": "assistant", "content": "Yes.", name: "Hm."}
    answer = chat(replace(echo, chat_prompts=prompts), messages=[*HELLO, said, *HELLO])
    assert prompt_of(answer) == "Hm.Hm."


def test_the_template_sees_the_tools_and_earlier_calls() -> None:
    called = {
        "role": "assistant",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rom <|eos|>"}'},
            }
        ],
    }
    result = {"role": "tool", "content": "sunny", "tool_call_id": "c1"}
    prompt = prompt_of(chat(messages=[*HELLO, called, result]))
    shown, _, rest = prompt.partition("|")
    assert json.loads(shown) == [WEATHER, NOW]
    assert rest == "user:hello;assistant:(c1 weather Rom <|eos|>);tool:sunnyc1;"


@pytest.mark.parametrize("arguments", ['{"city": ', "[1]", "city", "[" * 3_000])
def test_the_template_sees_malformed_arguments_as_they_were(arguments: str) -> None:
    function = {"name": "weather", "arguments": arguments}
    called = {"role": "assistant", "tool_calls": [{"id": "c1", "function": function}]}
    result = {"role": "tool", "content": "What?", "tool_call_id": "c1"}
    echo = model()
    prompts = ChatPrompts(echo.tokenizer, ChatTemplate("{{ messages[1].tool_calls | tojson }}", {}))
    answer = chat(replace(echo, chat_prompts=prompts), messages=[*HELLO, called, result])
    assert json.loads(prompt_of(answer))[0]["function"] == function


def test_a_model_that_may_call_nothing_sees_no_tools() -> None:
    answer = chat(tool_choice="none")
    assert prompt_of(answer).startswith("null|")
    assert whole(answer, TAGGED)["message"]["content"] == TAGGED


def guided_text(grammars: Grammars, answer: Answer, draw: random.Random) -> str:
    """What a model without any sense writes under the grammar."""
    guide = answer.generation.params.guide
    assert guide is not None
    guided, tokens = grammars.begin(guide), array("i")
    while len(tokens) < 4000:
        mask = guided.mask(tokens)
        allowed = [token for token in range(257) if mask[token >> 3] >> (token & 7) & 1]
        if allowed == [256] or (256 in allowed and draw.random() < 0.5):
            return bytes(list(tokens)).decode()
        tokens.append(draw.choice([token for token in allowed if token != 256]))
    raise AssertionError("no end")


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_valid_whatever_the_model_wants(parallel: bool) -> None:
    draw = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    fields = {"tool_choice": "required", "parallel_tool_calls": parallel, "request_id": "it"}
    tools = [WEATHER, {"type": "function", "function": {"name": "nothing", "parameters": EMPTY}}]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    served = model(None)
    seen = set()
    for _ in range(20):
        text = guided_text(GRAMMARS, chat(served, tools=tools, **fields), draw)
        choice = whole(chat(served, tools=tools, **fields), text)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        calls = choice["message"]["tool_calls"]
        assert parallel or len(calls) == 1
        for call in calls:
            seen.add(call["function"]["name"])
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, schemas[call["function"]["name"]])
        same(streamed(chat(served, tools=tools, stream=True, **fields), text), choice)
    assert seen == {"weather", "nothing"}


def test_required_calls_of_any_tool_are_valid() -> None:
    draw = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    for _ in range(20):
        fields = {"a": random_schema(draw, 2), "b": random_schema(draw, 2)}
        schema = {"type": "object", "properties": fields, "additionalProperties": False}
        schema["description"] = 'braces } and " quotes \n \\ {'
        tool = {"type": "function", "function": {"name": "any-1.x", "parameters": schema}}
        answer = chat(tools=[tool], tool_choice="required")
        choice = whole(answer, guided_text(GRAMMARS, answer, draw))
        for call in choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


def test_a_named_call_is_valid_whatever_the_model_wants() -> None:
    draw = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    named = {"type": "function", "function": {"name": "weather"}}
    for _ in range(10):
        text = guided_text(GRAMMARS, chat(tool_choice=named), draw)
        choice = whole(chat(tool_choice=named, request_id="it"), text)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert choice["finish_reason"] == "tool_calls"
        jsonschema.validate(
            json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"]
        )
        same(streamed(chat(tool_choice=named, request_id="it", stream=True), text), choice)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_calls_that_are_guaranteed_and_cut_leave_no_notation(choice: Any) -> None:
    draw = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    fields = {"tools": [WEATHER], "tool_choice": choice, "request_id": "it"}
    text = guided_text(GRAMMARS, chat(**fields), draw)
    for end in range(1, min(len(text), 300)):
        answer = whole(chat(**fields), text[:end], Finish.LENGTH)
        assert answer["finish_reason"] == "length"
        assert not answer["message"]["content"], text[:end]
        for call in answer["message"].get("tool_calls", []):
            assert call["function"]["name"] == "weather"
            assert call["function"]["arguments"] in text
        same(streamed(chat(stream=True, **fields), text[:end], Finish.LENGTH), answer)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "function"),
        ({"tools": [{"type": "other", "function": {"name": "a"}}]}, "tools", "other"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
        ({"tools": [NOW, NOW]}, "tools", "same name"),
        ({"tools": [NOW] * 129}, "tools", "128"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "any"}, "tool_choice", "any"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "sum"}}},
            "tool_choice",
            "sum",
        ),
        ({"tool_choice": "required", "min_tokens": 3}, "min_tokens", "tools"),
        (
            {"tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "tool_choice",
            "no room",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}
                ],
            },
            "tools",
            "not",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages", "content"),
        ({"messages": [{"role": "user", "tool_calls": []}]}, "messages", "content"),
    ],
)
def test_what_is_wrong_names_its_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert words in caught.value.message


STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}


def follows(answer: Answer, text: str) -> bool:
    """Whether the answer's grammar lets a text come and end."""
    guide = answer.generation.params.guide
    assert guide is not None
    outputs = array("i", [*text.encode()])
    try:
        mask = GRAMMARS.begin(guide).mask(outputs)
    except DisobeyedError:
        return False
    return bool(mask[256 >> 3] & 1)


@pytest.mark.parametrize(
    ("text", "follows_it"),
    [
        ("It is warm. <tool>", True),
        (
            'Wait.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
            True,
        ),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": 5}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "wether", "arguments": {"city": "Rome"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "time.now", "arguments": {"zone": 1}}\n</tool_call> Bye.', True),
        ('<tool_call>\n{"name": "time.now", "arguments": [1]}\n</tool_call>', False),
        ("<tool_call>\nNo.", False),
    ],
)
def test_a_strict_tool_bounds_what_the_model_may_call(text: str, follows_it: bool) -> None:
    assert follows(chat(tools=[STRICT, NOW]), text) is follows_it


def test_strict_calls_are_read_like_others_and_leave_room_for_thoughts() -> None:
    answer = chat(model(thoughts="qwen3"), tools=[STRICT], tool_choice="auto")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    text = "<think>Hm.</think>" + call
    assert follows(answer, text)
    message = whole(answer, text)["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


SUNNY = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
FORM = {"type": "json_schema", "json_schema": {"name": "sunny", "schema": SUNNY}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "follows_it"),
    [
        ('{"sunny": true}', True),
        (CALL, True),
        (f"{CALL}\n{CALL}", True),
        ("\n".join([CALL] * 17), False),
        ('{"sunny": 5}', False),
        ('{"sunny": true}' + CALL, False),
        (CALL + '{"sunny": true}', False),
        ("It is sunny.", False),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": 5}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "zork", "arguments": {}}\n</tool_call>', False),
        ("", False),
    ],
)
def test_structured_output_leaves_room_for_calls_in_its_place(text: str, follows_it: bool) -> None:
    assert follows(chat(tools=[STRICT, NOW], response_format=FORM), text) is follows_it


def test_what_is_in_the_place_of_structured_output_is_read_as_such() -> None:
    called = whole(chat(tools=[WEATHER], response_format=FORM), CALL)
    assert called["finish_reason"] == "tool_calls"
    assert called["message"]["content"] is None
    (call,) = called["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    said = whole(chat(tools=[WEATHER], response_format=FORM), '{"sunny": true}')
    assert (said["finish_reason"], said["message"]["content"]) == ("stop", '{"sunny": true}')
    one = chat(tools=[WEATHER], response_format=FORM, parallel_tool_calls=False)
    assert follows(one, CALL)
    assert not follows(one, f"{CALL}\n{CALL}")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_call_that_must_be_is_all_there_is_beside_structured_output(choice: Any) -> None:
    must = chat(tool_choice=choice).generation.params.guide
    assert chat(tool_choice=choice, response_format=FORM).generation.params.guide == must


def test_a_format_that_is_wrong_is_named_beside_tools_too() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/nowhere"}}}
    with pytest.raises(ApiError, match=r"response_format\.json_schema\.schema") as caught:
        chat(response_format=form)
    assert caught.value.param == "response_format"


def test_calls_are_not_guided_where_no_tool_is_strict_or_the_model_writes_no_tags() -> None:
    assert chat().generation.params.guide is None
    assert chat(model("pythonic"), tools=[STRICT]).generation.params.guide is None
    guide = chat(model("pythonic"), response_format=FORM).generation.params.guide
    assert guide == chat(tools=[], response_format=FORM).generation.params.guide


def test_auto_needs_to_know_the_model() -> None:
    with pytest.raises(ApiError, match=r"--tool-call-parser") as caught:
        chat(model(None))
    assert caught.value.param == "tool_choice"
    assert chat(model(None), tools=[], tool_choice="auto").generation.message is None


def test_markers_that_are_special_tokens_are_text() -> None:
    for family in NOTATIONS:
        assert chat(model(family)).generation.keeps_special
        assert not chat(model(family), tools=None).generation.keeps_special
        assert not chat(model(family), tool_choice="required").generation.keeps_special
    assert chat(model(None, "mistral"), tools=None).generation.keeps_special
    assert not chat(model(None, "granite"), tools=None).generation.keeps_special


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_are_allowed(mode: str) -> None:
    def among(*names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    asked = chat(tools=[WEATHER, NOW], tool_choice=among("time.now"))
    alone = chat(tools=[NOW], tool_choice=mode)
    assert prompt_of(asked) == prompt_of(alone)
    assert asked.generation.params.guide == alone.generation.params.guide
    assert asked.generation.message is not None
    for choice, words in ((among("time.now", "zork"), "'zork', which is not"), (among(), "length")):
        with pytest.raises(ApiError, match=words) as caught:
            chat(tools=[WEATHER, NOW], tool_choice=choice)
        assert caught.value.param == "tool_choice"
