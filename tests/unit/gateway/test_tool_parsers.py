"""Calls in text: the same however the text is cut, and nothing of it is lost."""

import json
import random
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.tool_parsers.guaranteed import only, required
from pagefleet_gateway.tool_parsers.notations import NOTATIONS
from pagefleet_gateway.tool_parsers.parser import CallDelta, Spoken, ToolParser
from pagefleet_gateway.tool_parsers.schema_types import ALL_TYPES, types_of

GUARANTEED = {"required": required, "only": only("weather")}
"""Of texts that are nothing but calls: a piece of one is none, and no content."""

SCHEMAS: dict[str, Any] = {
    "weather": {
        "$defs": {"days": {"type": ["array", "null"]}},
        "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
    },
    "f": {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
}
"""Of tools that bare text is written for."""

SCRIPTS = {name: notation.script for name, notation in NOTATIONS.items()} | GUARANTEED
WEATHER = ("weather", {"city": "Zürich", "days": [1, {"}": '"\\'}]})
NOW = ("time.now", {})
Call = tuple[str, dict[str, Any]]


def parse(family: str, pieces: list[str]) -> tuple[str, list[Call]]:
    """Content, and calls whose arguments are JSON."""
    content, calls = raw(family, pieces)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def raw(family: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(SCRIPTS[family], SCHEMAS)
    spoken: list[Spoken] = [each for piece in pieces for each in parser.push(piece)]
    spoken += parser.finish()
    content = "".join(each for each in spoken if isinstance(each, str))
    calls: list[tuple[str, str]] = []
    for delta in spoken:
        if not isinstance(delta, CallDelta):
            continue
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        assert delta.index == len(calls) - 1
        calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return content, calls


def harmony(call: Call) -> str:
    return f"<|channel|>commentary to=functions.{call[0]}<|message|>{json.dumps(call[1])}<|call|>"


def obj(call: Call, arguments: str = "arguments") -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, ensure_ascii=False)


def tagged(*calls: Call) -> str:
    return "\n".join(f"<tool_call>\n{obj(call)}\n</tool_call>" for call in calls)


BACKWARDS = json.dumps({"arguments": WEATHER[1], "id": 5, "name": WEATHER[0]})
MARKER = "[TOOL_CALLS]"
PYTHON = '[weather(city="Zürich", days=[1, {"}": "\\"\\\\"}]), time.now()]'


def xml(call: Call) -> str:
    """As Qwen3-Coder writes it."""
    return xml_call(call[0], {name: bare(value) for name, value in call[1].items()})


def xml_call(name: str, values: dict[str, str]) -> str:
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def keyed(call: Call, line: str = "\n") -> str:
    """As GLM writes it; line: what ends lines."""
    pairs = (
        f"<arg_key>{name}</arg_key>{line}<arg_value>{bare(value)}</arg_value>{line}"
        for name, value in call[1].items()
    )
    return f"<tool_call>{call[0]}{line}{''.join(pairs)}</tool_call>"


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def python(call: Call) -> str:
    arguments = (f"{name}={value!r}" for name, value in call[1].items())
    return f"{call[0]}({', '.join(arguments)})"


def deepseek(name: str) -> str:
    return f"<\N{FULLWIDTH VERTICAL LINE}tool▁{name}\N{FULLWIDTH VERTICAL LINE}>"


def fenced(call: Call) -> str:
    arguments = json.dumps(call[1], ensure_ascii=False)
    function = f"function{deepseek('sep')}{call[0]}\n```json\n{arguments}\n```"
    return deepseek("call▁begin") + function + deepseek("call▁end")


FENCED = f"{deepseek('calls▁begin')}{fenced(WEATHER)}\n{fenced(NOW)}{deepseek('calls▁end')}"
FUNCTION = "<function=f>\n<parameter=a>\n"


CASES: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", "Just text < tool_call>.\n", "Just text < tool_call>.\n", []),
    ("hermes", tagged(WEATHER, NOW), "", [WEATHER, NOW]),
    ("qwen", f" Let me see.\n\n{tagged(WEATHER)}\n", " Let me see.", [WEATHER]),
    ("hermes", f"a\n{tagged(NOW)}\nb\n{tagged(WEATHER)} c \n", "abc \n", [NOW, WEATHER]),
    ("hermes", f"<tool_call>{BACKWARDS}</tool_call>", "", [WEATHER]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    ("hermes", '<tool_call>{"answer": 5}', '<tool_call>{"answer": 5}', []),
    ("hermes", '<tool_call>{"name": "a b"}', '<tool_call>{"name": "a b"}', []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "x"}',
        '<tool_call>{"name": "f", "arguments": "x"}',
        [],
    ),
    ("hermes", f"<tool_call>{obj(NOW)} <tool_call>", "<tool_call>", [NOW]),
    ("hermes", f"<tool_call>{obj(NOW)}\n{tagged(WEATHER)}", "", [NOW, WEATHER]),
    ("hermes", f"<tool_call>{tagged(NOW)}", "<tool_call>", [NOW]),
    ("hermes", f"</tool_call>{tagged(NOW)}</tool_call>", "</tool_call></tool_call>", [NOW]),
    ("llama3_json", obj(WEATHER, "parameters"), "", [WEATHER]),
    ("llama3_json", f"<|python_tag|>{obj(NOW)}; {obj(WEATHER)}", "", [NOW, WEATHER]),
    ("llama3_json", f"It is {obj(NOW)}", f"It is {obj(NOW)}", []),
    ("llama3_json", '{"answer": 5}', '{"answer": 5}', []),
    ("llama3_json", f"{obj(NOW)} and more", "and more", [NOW]),
    ("llama3_json", "<|python", "<|python", []),
    ("mistral", f"{MARKER} [{obj(WEATHER)}, {obj(NOW)}]", "", [WEATHER, NOW]),
    ("mistral", f"Well{MARKER}time.now[ARGS]{{}}", "Well", [NOW]),
    (
        "mistral",
        f'{MARKER}a{{"b": 1}}{MARKER}weather[CALL_ID]x7[ARGS]{json.dumps(WEATHER[1])}',
        "",
        [("a", {"b": 1}), WEATHER],
    ),
    ("mistral", f"{MARKER}no call", f"{MARKER}no call", []),
    ("mistral", f"{MARKER}[]", f"{MARKER}[]", []),
    ("pythonic", PYTHON, "", [WEATHER, NOW]),
    ("pythonic", "[f(a=None, b=True)] done", "done", [("f", {"a": None, "b": True})]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(**{})]", "[f(**{})]", []),
    ("pythonic", "[f(a=g())]", "[f(a=g())]", []),
    ("pythonic", "[f(a=1e999)]", "[f(a=1e999)]", []),
    ("pythonic", "[f(a={1})]", "[f(a={1})]", []),
    ("pythonic", "f(a=1)", "f(a=1)", []),
    ("pythonic", r'[f(a="\d")]', "", [("f", {"a": r"\d"})]),
    ("pythonic", "[f(a=null, b=true)]", "", [("f", {"a": None, "b": True})]),
    ("granite4", tagged(WEATHER), "", [WEATHER]),
    ("granite", f"So: <|tool_call|> [{obj(WEATHER)}, {obj(NOW)}]", "So:", [WEATHER, NOW]),
    ("granite", f"<tool_call>[{obj(NOW)}]<tool_call>", "<tool_call>", [NOW]),
    ("granite", f"<tool_call>{obj(NOW)}", f"<tool_call>{obj(NOW)}", []),
    ("granite", "<|tool_call|>[]", "<|tool_call|>[]", []),
    ("phi4_mini_json", f"functools[{obj(WEATHER, 'parameters')},\n{obj(NOW)}]", "", [WEATHER, NOW]),
    ("phi4_mini_json", "import functools [", "import functools [", []),
    (
        "olmo3",
        f"<function_calls>\n{python(WEATHER)}\nf(a=null)\n</function_calls>",
        "",
        [WEATHER, ("f", {"a": None})],
    ),
    ("olmo3", "a <function_calls></function_calls>", "a <function_calls></function_calls>", []),
    ("olmo3", f"<function_calls>{python(NOW)} or </function_calls> b", "or  b", [NOW]),
    ("deepseek_v3", f"I see. {FENCED}", "I see.", [WEATHER, NOW]),
    ("deepseek_v3", f"{fenced(NOW)} b", "b", [NOW]),
    ("deepseek_v3", deepseek("calls▁begin"), deepseek("calls▁begin"), []),
    ("qwen3_coder", f"Now.\n{xml(WEATHER)}\n{xml(NOW)}", "Now.", [WEATHER, NOW]),
    ("qwen3_coder", f"{FUNCTION}5\n</parameter></function></tool_call>b", "b", [("f", {"a": "5"})]),
    ("qwen3_coder", xml_call("f", {"a": "None"}), "", [("f", {"a": None})]),
    ("qwen3_coder", xml_call("f", {"b": "{'c': True}"}), "", [("f", {"b": {"c": True}})]),
    ("qwen3_coder", xml_call("f", {"b": "NaN"}), "", [("f", {"b": "NaN"})]),
    ("qwen3_coder", xml_call("weather", {"days": "two"}), "", [("weather", {"days": "two"})]),
    ("qwen3_coder", xml_call("weather", {"city": ' "5"\n'}), "", [("weather", {"city": ' "5"\n'})]),
    (
        "qwen3_coder",
        f"{FUNCTION}x</parameter>, {FUNCTION[13:]}y</parameter></function>",
        "",
        [("f", {"a": "x"})],
    ),
    ("qwen3_coder", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ("qwen3_coder", "<function=a b>", "<function=a b>", []),
    ("glm45", f"{keyed(WEATHER)}\n{keyed(NOW)}", "", [WEATHER, NOW]),
    ("glm45", f"a {keyed(WEATHER, '')} b", "ab", [WEATHER]),
    ("glm45", "<tool_call>f x", "<tool_call>f x", []),
    ("openai", f"I look. {harmony(WEATHER)}{harmony(NOW)} So.", "I look.So.", [WEATHER, NOW]),
    (
        "openai",
        "<|channel|>commentary to=functions.f<|message|>[",
        "<|channel|>commentary to=functions.f<|message|>[",
        [],
    ),
    ("required", f"[{obj(WEATHER, 'parameters')}, {obj(NOW, 'parameters')}]", "", [WEATHER, NOW]),
    ("only", json.dumps(WEATHER[1]), "", [WEATHER]),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_what_a_text_says_however_it_is_cut(
    family: str, text: str, content: str, calls: list[Call]
) -> None:
    assert parse(family, [text]) == (content, calls)
    assert parse(family, list(text)) == (content, calls)
    for at in range(len(text)):
        assert parse(family, [text[:at], text[at:]]) == (content, calls)


FRAGMENTS = [
    harmony(WEATHER), "<|channel|>commentary", " to=functions.", "<|message|>", "<|call|>",
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", obj(WEATHER), obj(NOW),
    obj(NOW, "parameters"), PYTHON, "[f(a=1)]", "[", "]", "{", "}", '"', "\\", ",", ";", "(", ")",
    "<|tool_call|>", "functools[", "<function_calls>", python(NOW), "</function_calls>", FENCED,
    deepseek("calls▁begin"), deepseek("call▁begin"), deepseek("calls▁end"), "```", xml(WEATHER),
    "<function=f>", "<parameter=a>", "</parameter>", "</function>", keyed(WEATHER), "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", '"name"', '"arguments"', ":", " ", "\n", "f", "<",
    "tool", "é", "[ARGS]", "'", "=",
]  # fmt: skip


@given(
    st.sampled_from(sorted(SCRIPTS)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.randoms(use_true_random=False),
)
def test_any_text_is_the_same_in_any_pieces(family: str, text: str, draw: random.Random) -> None:
    cuts = sorted(draw.sample(range(len(text) + 1), min(4, len(text) + 1)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = raw(family, [text])
    assert raw(family, pieces) == (content, calls)
    if not calls and not (family in GUARANTEED and content == ""):
        assert content == text


F = '{"name": "f", "arguments": '
MALFORMED: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>{F}{{'a': 1,}}}}</tool_call>", "", [("f", "{'a': 1,}")]),
    # A brace too few, and one too many.
    ("hermes", f'<tool_call>{F}{{"a": 1}}\n</tool_call> x', "x", [("f", '{"a": 1}')]),
    ("hermes", f'<tool_call>{F}{{"a": [1}}}}\n</tool_call>', "", [("f", '{"a": [1}}')]),
    (
        "hermes",
        f"<tool_call>{F}{{}}}}}}</tool_call>{tagged(NOW)}",
        "}",
        [("f", "{}"), ("time.now", "{}")],
    ),
    # A quote that is never closed.
    ("hermes", f'<tool_call>{F}{{"a": "b}}}}</tool_call>', "", [("f", '{"a": "b}}</tool_call>')]),
    # More than a name and arguments.
    ("hermes", f'<tool_call>{F}{{}}, "why": ["x"]}}</tool_call>!', "!", [("f", "{}")]),
    (
        "hermes",
        f'<tool_call>{F}{{"a": 1}}, "arguments": {{}}}}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    ("hermes", f"<tool_call>{F}{{}}, or?}}</tool_call> No.", ", or?} No.", [("f", "{}")]),
    ("llama3_json", f"{F}{{'a': 'it}}s'}}}}", "s'}}", [("f", "{'a': 'it}")]),
    ("llama3_json", f"{F}{{}}, {{", ", {", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS]f[ARGS]{'a' 1} x", "x", [("f", "{'a' 1}")]),
    ("mistral", f"[TOOL_CALLS][{F}{{}} {F}{{}}]", f"{F}{{}}]", [("f", "{}")]),
    ("pythonic", "[f(a=1), g(a=)]", ", g(a=)]", [("f", '{"a": 1}')]),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), MALFORMED)
def test_what_is_malformed_is_passed_on(
    family: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert raw(family, pieces) == (content, calls)


@given(
    st.text("{}[]':,\\ a1\n", max_size=20),
    st.text("x{}< \n", max_size=5),
    st.randoms(use_true_random=False),
)
def test_nothing_of_malformed_arguments_is_lost(
    inner: str, behind: str, draw: random.Random
) -> None:
    """Only what belongs to a call's notation goes: its last brace and its tag; and white space."""
    written = f"{{{inner}}}}}{behind}"
    text = f"<tool_call>{F}{written}</tool_call>."
    cuts = sorted(draw.sample(range(len(text)), 3))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, ((name, arguments),) = raw("hermes", pieces)
    assert name == "f"
    kept = "".join((arguments + content).split())
    written = "".join(written.split())
    braces = [at for at, character in enumerate(written) if character == "}"]
    without_one = [written[:at] + written[at + 1 :] for at in braces]
    assert kept in (f"{written}</tool_call>.", f"{written}.", *(f"{each}." for each in without_one))


LETTERS = "a5\"'\\\n {}[](),=é"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(LETTERS, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["f", "time.now", "a_b"]),
        st.dictionaries(st.sampled_from(["a", "b_1", "C"]), VALUES),
    ),
    min_size=1,
    max_size=3,
)


def joined(write: Callable[[Call], str], between: str = "\n") -> Callable[[list[Call]], str]:
    return lambda calls: between.join(map(write, calls))


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": joined(tagged),
    "llama3_json": joined(obj, "; "),
    "mistral": lambda calls: f"{MARKER}[{joined(obj, ', ')(calls)}]",
    "pythonic": lambda calls: f"[{joined(python, ', ')(calls)}]",
    "granite": lambda calls: f"<|tool_call|>[{joined(obj, ', ')(calls)}]",
    "phi4_mini_json": lambda calls: f"functools[{joined(obj, ', ')(calls)}]",
    "olmo3": lambda calls: f"<function_calls>\n{joined(python)(calls)}\n</function_calls>",
    "deepseek_v3": lambda calls: f"{deepseek('calls▁begin')}{joined(fenced)(calls)}",
    "qwen3_coder": joined(xml),
    "glm45": joined(keyed),
}
"""What models of a family write to make calls."""


@given(st.sampled_from(sorted(WRITERS)), CALLS, st.randoms(use_true_random=False))
def test_calls_are_read_as_they_were_meant(
    family: str, calls: list[Call], draw: random.Random
) -> None:
    """Strings that look like something else are told from it by the tool's schema."""
    for number, (_, values) in enumerate(calls):
        schema = {key: {"enum": [value]} for key, value in values.items()}
        calls[number] = (f"f{number}", values)
        SCHEMAS[f"f{number}"] = {"properties": schema}
    text = WRITERS[family](calls)
    cuts = sorted(draw.sample(range(len(text)), min(4, len(text))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(family, pieces) == ("", calls)


def test_strings_of_bare_text_come_as_they_are_written() -> None:
    parser = ToolParser(SCRIPTS["qwen3_coder"], SCHEMAS)
    assert parser.push("<tool_call><function=weather>") == []
    assert parser.push("<parameter=city>") == [CallDelta(0, "weather", "{")]
    assert parser.push('\n"Zü') == [CallDelta(0, None, '"city": "\\"Zü')]
    assert parser.push("rich\n</par") == [CallDelta(0, None, "rich")]
    assert parser.push("ameter><parameter=days>[1,") == [CallDelta(0, None, '", "days": ')]
    assert parser.push("2]</parameter>") == [CallDelta(0, None, "[1,2]")]
    assert parser.push("</function></tool_call>") == [CallDelta(0, None, "}")]


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"$ref": "#/$defs/a"}, {"string", "boolean"}),
        ({"$ref": "#/$defs/loop"}, ALL_TYPES),
        ({"$ref": "http://elsewhere"}, ALL_TYPES),
        ({"enum": ["a", 5]}, {"string", "integer", "number"}),
        ({"const": 0.5}, {"number"}),
        ({"oneOf": [{"const": None}, {"type": "object"}]}, {"null", "object"}),
        ({"oneOf": [{"type": "null"}, {}]}, ALL_TYPES),
        ({"anyOf": [{"type": "null"}] * 1000}, ALL_TYPES),
        ({"type": "text"}, ALL_TYPES),
        ({"anyOf": "nothing", "type": {}, "enum": 5}, ALL_TYPES),
        (True, ALL_TYPES),
        (None, ALL_TYPES),
    ],
)
def test_types_that_a_schema_takes(schema: Any, types: Collection[str]) -> None:
    either = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 9}
    root = {"$defs": {"a": either, "b": {"enum": [True]}, "loop": loop}}
    assert types_of(schema, root) == types


def test_options_offer_every_notation() -> None:
    offered = next(each for each in fields(GatewaySettings) if each.name == "tool_call_parser")
    assert set(offered.metadata["choices"]) == NOTATIONS.keys()


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolParser(SCRIPTS["hermes"])
    assert parser.push('Hm. <tool_call>{"name": "f"') == ["Hm."]
    assert parser.push(', "arguments": ') == []
    assert parser.push('{"a": ') == [CallDelta(0, "f", '{"a": ')]
    assert parser.push("[1,") == [CallDelta(0, None, "[1,")]
    assert parser.push("2]}}</tool_") == [CallDelta(0, None, "2]}")]
    assert parser.push("call> And?") == ["And?"]
    assert parser.finish() == []


def test_a_call_that_is_cut_off_stays_one() -> None:
    assert raw("hermes", ['<tool_call>{"name": "f", "arguments": {"a": "b']) == (
        "",
        [("f", '{"a": "b')],
    )
    assert raw("hermes", ['<tool_call>{"name": "f", "argu']) == (
        '<tool_call>{"name": "f", "argu',
        [],
    )
