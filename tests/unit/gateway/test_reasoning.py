"""Thoughts and answers: the same however the text is cut, and nothing of it is lost."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.text.reasoning import FAMILIES, Marks, ReasoningParser, reader

MARKS = {name: each for name, each in FAMILIES.items() if isinstance(each, Marks)}
"""All but Harmony, of which `test_harmony` is."""


def parse(marks: Marks, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(marks, marks.at_once)
    thoughts = [*map(parser.push, pieces), parser.finish()]
    reasoning, content = zip(*thoughts, strict=True)
    return "".join(reasoning), "".join(content)


@pytest.mark.parametrize(
    ("text", "qwen3", "deepseek_r1"),
    [
        ("<think>\nWell.\n</think>\n\nYes.", ("\nWell.\n", "\n\nYes."), None),
        (" \n<think>a</think>b</think>", ("a", "b</think>"), None),
        ("Well.</think>Yes.", ("", "Well.</think>Yes."), ("Well.", "Yes.")),
        ("Yes, <think> is a tag.", ("", "Yes, <think> is a tag."), ("Yes, <think> is a tag.", "")),
        ("<think>1 < 2 </thin", ("1 < 2 </thin", ""), None),
        ("<think></think>", ("", ""), None),
        ("  <thi", ("", "  <thi"), ("  <thi", "")),
        ("", ("", ""), None),
    ],
)
def test_thoughts_are_parted_from_the_answer(
    text: str, qwen3: tuple[str, str], deepseek_r1: tuple[str, str] | None
) -> None:
    wanted = {"qwen3": qwen3, "deepseek_r1": deepseek_r1 or qwen3}
    for name in wanted:
        same_in_any_two(MARKS[name], text, wanted[name])


def same_in_any_two(marks: Marks, text: str, wanted: tuple[str, str]) -> None:
    for at in range(len(text) + 1):
        assert parse(marks, [text[:at], text[at:]]) == wanted
    assert parse(marks, list(text)) == wanted


@pytest.mark.parametrize(
    ("family", "text", "wanted"),
    [
        ("mistral", "[THINK]a [/THINK b[/THINK]c", ("a [/THINK b", "c")),
        ("mistral", "[TH", ("", "[TH")),
        ("granite", "Here is my thought process: a\nHere's my response: b", (" a\n", " b")),
        ("granite", "Here's my thought process:Here is my respons", ("Here is my respons", "")),
        ("granite", "Here is my response: b", ("", "Here is my response: b")),
        (
            "granite",
            "Here's my thought process: Here's my response:Here is my response:",
            (" ", "Here is my response:"),
        ),
    ],
)
def test_marks_of_other_families(family: str, text: str, wanted: tuple[str, str]) -> None:
    same_in_any_two(MARKS[family], text, wanted)


PIECES = [
    "<think>", "</think>", "<", "</", "think", ">", " ", "a", "\n", "[THINK]", "[/THINK]", "[",
    "Here is my thought process:", "Here's my response:", "Here", " is my ", "response", ":",
]  # fmt: skip


@given(st.sampled_from(sorted(MARKS)), st.lists(st.sampled_from(PIECES)))
def test_any_text_is_the_same_in_any_pieces(family: str, pieces: list[str]) -> None:
    text, marks = "".join(pieces), MARKS[family]
    reasoning, content = parse(marks, pieces)
    assert (reasoning, content) == parse(marks, [text]) == parse(marks, list(text))
    both = max(map(len, marks.opens)) + max(map(len, marks.closes))
    assert len(reasoning + content) >= len(text.strip()) - both


@pytest.mark.parametrize(
    ("before", "goes_on", "expected"),
    [
        ("assistant\n", False, {"qwen3": False, "deepseek_r1": True}),
        ("assistant\n<think>\n", False, True),
        ("assistant\n<think>\n\n</think>\n\n", False, None),
        ("what is <think>?\nassistant\n", False, {"qwen3": False, "deepseek_r1": True}),
        ("I am", True, None),
        ("<think>Let me", True, True),
        ("<think>Hm.</think>I", True, None),
        (" ", True, {"qwen3": False, "deepseek_r1": True}),
    ],
)
def test_where_an_answer_begins(
    before: str, goes_on: bool, expected: bool | dict[str, bool] | None
) -> None:
    for family in ("qwen3", "deepseek_r1"):
        wanted = expected[family] if isinstance(expected, dict) else expected
        parser = reader(MARKS[family], before, goes_on)
        assert (parser and parser().thinks) is wanted


def test_options_offer_every_family() -> None:
    offered = next(each for each in fields(GatewaySettings) if each.name == "reasoning_parser")
    assert set(offered.metadata["choices"]) == FAMILIES.keys()
