"""JSON as strategies: what a schema allows, what it nearly allows, and what is hardly JSON.

Bodies are made from the OpenAPI document of the server itself, so a new field is fuzzed as soon as
it exists. They are text, not values, because the worst of them have no value in Python.
"""

import json
from functools import cache
from typing import Any

from hypothesis import strategies as st

from pagefleet_gateway.http.openapi import document

DOCUMENT: dict[str, Any] = json.loads(document())

_LARGEST = 2**31 - 1

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([-(2**63) - 1, -(2**63), -(2**31), _LARGEST + 1, 2**63, 2**64, 10**400]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
)
ANYTHING = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)

_SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "string", "pattern": "^[ab]{1,4}$"},
    {"enum": ["x", 1, None]},
    {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#"}}}},
    {"not": {}},
    {"const": 2**64},
    {"$ref": "#/nowhere"},
    {"type": "array", "minItems": 10**9},
    {"allOf": [{"type": "integer"}, {"type": "string"}]},
    {"type": "string", "pattern": "((a+)+)+$", "maxLength": 10**12},
)
_ECHO = {"type": "function", "function": {"name": "echo", "parameters": _SCHEMAS[0]}}
_FLAT_ECHO = {"type": "function", "name": "echo", "parameters": _SCHEMAS[0]}
_CLIENT_ECHO = {"name": "echo", "input_schema": _SCHEMAS[0]}
_USED = {"type": "tool_use", "id": "a", "name": "echo", "input": {"a": 2**70, "b": [None]}}
_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "b", "is_error": True}
_CALL = {"type": "function_call", "call_id": "a", "name": "echo", "arguments": "{}"}
_CALLED = {"id": "a", "function": {"name": "echo", "arguments": '{"a": NaN}'}}
_OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "b"}
_THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "c"}],
}

PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "model": ("echo", "sql", None, "gpt-0"),
    "max_tokens": (0, 1, 2, 8, 20),
    "max_completion_tokens": (1, 2, 8),
    "min_tokens": (0, 1, 3),
    "n": (1, 2, 3),
    "best_of": (1, 2, 4),
    "timeout": (0.0001, 0.05, 5.0, 86_400),
    "allowed_token_ids": ([97], [97, 98, 99], [], [256, 10**6]),
    "stop_token_ids": ([97], list(range(0, 256, 3))),
    "truncate_prompt_tokens": (-1, 0, 1, 5),
    "max_output_tokens": (1, 2, 8),
    "input": (
        "Hello",
        [{"role": "user", "content": "a"}, _CALL, _OUTPUT, _THOUGHT],
        [_THOUGHT],
        "",
        ["a", "b"],
        [[97], [98, 99]],
    ),
    "dimensions": (1, 5, 16, 17),
    "messages": (
        [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "assistant", "tool_calls": [_CALLED]}, {"role": "tool", "content": "a"}],
        [{"role": "assistant", "refusal": "a"}, {"role": "user", "content": []}],
        [{"role": "assistant", "content": [_USED]}, {"role": "user", "content": [_RESULT]}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "system", "content": "a"}] * 3,
    ),
    "system": ("Be brief.", [{"type": "text", "text": "a"}], ""),
    "stop_sequences": (["a", "bc"], [], ["\n"] * 17),
    "thinking": ({"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled"}),
    "include": (["message.output_text.logprobs"], ["reasoning.encrypted_content"], []),
    "type": ("text", "function", "json_object", "json_schema", "message", "input_text"),
    "regex": ("[a-z]+", "(ab|c){3}", "(?=x)y", "a{1,99999}", "(", "\\d+(\\.\\d+)?", "[^\\0]*"),
    "grammar": ('root ::= "a" | "b" root', 'start: "a"+', "start: start start | ", "%json {}"),
    "choice": (["yes", "no"], ["", "a"], ["a"] * 100),
    "schema": _SCHEMAS,
    "json": _SCHEMAS,
    "parameters": _SCHEMAS,
    "tools": ([_ECHO], [_ECHO] * 3, [], [_FLAT_ECHO], [_FLAT_ECHO] * 3, [_CLIENT_ECHO]),
    "tool_choice": (
        *("none", "auto", "required", {"type": "function", "function": {"name": "echo"}}),
        *({"type": "function", "name": "echo"}, {"type": "web_search"}),
        *({"type": "any"}, {"type": "tool", "name": "echo"}, {"type": "auto"}),
    ),
    "logit_bias": ({"97": 5}, {"256": -100}, {"97": 1e300}, {"-1": 0}, {"²": 1}),
    "stop": ("a", ["a", "bc"], ["\n"] * 16, "é"),
    "prompt": ("Once", [1, 2, 3], [[1], [2, 2]], ["a", "b"], [], [""], [[]], "\x00", "é" * 40),
    "content": (
        "Hello",
        "",
        [{"type": "text", "text": "a"}],
        "<|im_end|>",
        "\u202e\U0001f468\u200d",
    ),
    "arguments": (
        *("{}", '{"a": 1}', "[]", "{", '{"a": NaN}', '{"a": "\\ud800"}'),
        *(f'{{"a": {2**64}}}', '{"a": ' * 700 + "1" + "}" * 700),
    ),
    "chat_template_kwargs": ({"enable_thinking": False}, {"messages": []}, {"thinking": 2**64}),
}
"""Values of fields, by name, with which a request gets further than to the check of its types."""

HARDLY_JSON = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e-999", "-0", "01", "0x10", "1_000", "tru"),
    *("9" * 5000, "1" + "0" * 400, "0." + "3" * 4000, r'"\ud800"', r'"\udc00\ud800"', r'"\u0000"'),
    *('"\x00"', r'"\x41"', "'a'", "[1,]", "{,}", "[" * 100_000, "[" * 400 + "]" * 400),
    *('{"a":' * 300 + "1" + "}" * 300, '"' + "a" * 40_000 + '"', '{"a":1,"a":2}', "/**/1", ""),
)
"""Texts in the place of a value."""


def allowed(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values under a schema of the server's own document."""
    return _allowed(json.dumps(schema))


@cache
def _allowed(text: str) -> st.SearchStrategy[Any]:
    schema = json.loads(text)
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return st.deferred(lambda: allowed(DOCUMENT["components"]["schemas"][name]))
    if "anyOf" in schema:
        return st.one_of([allowed(each) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "integer":
            low, high = schema.get("minimum", -_LARGEST), schema.get("maximum", _LARGEST)
            return st.integers(low, high) | st.integers(max(low, 0), min(high, 20))
        case "number":
            return st.floats(
                schema.get("minimum", schema.get("exclusiveMinimum")),
                schema.get("maximum"),
                allow_nan=False,
                allow_infinity=False,
            )
        case "string":
            least = schema.get("minLength", 0)
            return st.text(min_size=least, max_size=min(schema.get("maxLength", 20), 20))
        case "array":
            return st.lists(allowed(schema["items"]), max_size=3)
        case "object" if "properties" in schema:
            return _objects(schema)
        case "object":
            return st.dictionaries(st.text(max_size=5) | st.just("97"), ANYTHING, max_size=3)
    return {"boolean": st.booleans(), "null": st.none()}.get(schema.get("type"), ANYTHING)


@st.composite
def _objects(draw: st.DrawFn, schema: dict[str, Any]) -> dict[str, Any]:
    """The required fields and a few others; now and then a field or a value is wrong."""
    fields = schema["properties"]
    others = draw(st.lists(st.sampled_from(sorted(fields)), max_size=5))
    made = {}
    for name in [*schema["required"], *others]:
        values = [allowed(fields[name])]
        if name in PLAUSIBLE:
            values += [st.sampled_from(PLAUSIBLE[name])] * 3
        made[name] = draw(st.one_of(values))
    match draw(st.integers(0, 15)):
        case 0 if made:
            made[draw(st.sampled_from(sorted(made)))] = draw(ANYTHING)
        case 1:
            made[draw(st.text(max_size=12) | st.sampled_from(["temprature", "suffix"]))] = draw(
                ANYTHING
            )
        case 2 if made:
            del made[draw(st.sampled_from(sorted(made)))]
    return made


@st.composite
def bodies(draw: st.DrawFn, schema: dict[str, Any]) -> bytes:
    """A request's body under a schema: whole JSON three times in four."""
    body = draw(allowed(schema))
    fault = draw(st.integers(0, 15))
    if fault == 0:
        body[draw(st.sampled_from([*sorted(body), "user"]))] = "@raw@"
    text = json.dumps(body, ensure_ascii=draw(st.booleans())).encode()
    match fault:
        case 0:
            return text.replace(b'"@raw@"', draw(st.sampled_from(HARDLY_JSON)).encode())
        case 1:
            return text[: draw(st.integers(0, len(text)))]
        case 2:
            return mutated(draw, text)
        case 3:
            return draw(
                st.sampled_from(
                    [b"\xef\xbb\xbf" + text, text.decode().encode("utf-16"), text * 2, b"", b"[]"]
                )
            )
    return text


def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """A few bytes changed, inserted, doubled or dropped."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(changed)))
        match draw(st.integers(0, 3)):
            case 0:
                changed[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                changed[at:at] = draw(st.binary(min_size=1, max_size=8))
            case 2:
                changed[at:at] = changed[at : at + draw(st.integers(1, 40))]
            case _:
                del changed[at : at + draw(st.integers(1, 40))]
    return bytes(changed)
