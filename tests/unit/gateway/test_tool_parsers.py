"""Calls in text: the same however the text is cut, and nothing of it is lost."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_gateway.tool_parsers.guaranteed import only, required
from pagefleet_gateway.tool_parsers.notations import NOTATIONS
from pagefleet_gateway.tool_parsers.parser import CallDelta, Spoken, ToolParser

GUARANTEED = {"required": required, "only": only("weather")}
"""Of texts that are nothing but calls: a piece of one is none, and no content."""

SCRIPTS = {name: notation.script for name, notation in NOTATIONS.items()} | GUARANTEED
WEATHER = ("weather", {"city": "Zürich", "days": [1, {"}": '"\\'}]})
NOW = ("time.now", {})
Call = tuple[str, dict[str, Any]]


def parse(family: str, pieces: list[str]) -> tuple[str, list[Call]]:
    """Content, and calls whose arguments are JSON."""
    content, calls = raw(family, pieces)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def raw(family: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolParser(SCRIPTS[family])
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


def obj(call: Call, arguments: str = "arguments") -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, ensure_ascii=False)


def tagged(*calls: Call) -> str:
    return "\n".join(f"<tool_call>\n{obj(call)}\n</tool_call>" for call in calls)


BACKWARDS = json.dumps({"arguments": WEATHER[1], "id": 5, "name": WEATHER[0]})
MARKER = "[TOOL_CALLS]"
PYTHON = '[weather(city="Zürich", days=[1, {"}": "\\"\\\\"}]), time.now()]'

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
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", obj(WEATHER), obj(NOW),
    obj(NOW, "parameters"), PYTHON, "[f(a=1)]", "[", "]", "{", "}", '"', "\\", ",", ";", "(", ")",
    '"name"', '"arguments"', ":", " ", "\n", "f", "<", "tool", "é", "[ARGS]", "'", "=",
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
