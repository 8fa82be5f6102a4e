"""Thoughts and answers: the same however the text is cut, and nothing of it is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_gateway.text.reasoning import THINKS_AT_ONCE, ReasoningParser, thinks_at_once


def parse(at_once: bool, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(at_once)
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
    for name, at_once in THINKS_AT_ONCE.items():
        for at in range(len(text) + 1):
            assert parse(at_once, [text[:at], text[at:]]) == wanted[name]
        assert parse(at_once, list(text)) == wanted[name]


@given(
    st.booleans(),
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "a", "\n"])),
)
def test_any_text_is_the_same_in_any_pieces(at_once: bool, pieces: list[str]) -> None:
    text = "".join(pieces)
    reasoning, content = parse(at_once, pieces)
    assert (reasoning, content) == parse(at_once, [text])
    assert len(reasoning + content) >= len(text.strip()) - len("<think></think>")


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
    for family in THINKS_AT_ONCE:
        wanted = expected[family] if isinstance(expected, dict) else expected
        assert thinks_at_once(family, before, goes_on) is wanted
