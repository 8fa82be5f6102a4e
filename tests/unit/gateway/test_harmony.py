"""Harmony: what is thought, said and called, the same however the text is cut."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet.wire import Finish
from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.answers.message import MessageForm, MessageReader
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.text.harmony import Harmony, HarmonyParser
from pagefleet_gateway.tool_parsers.notations import NOTATIONS
from pagefleet_gateway.tool_parsers.parser import ToolParser
from tests.unit.gateway import test_messages_stream, test_response_stream, test_tools
from tests.unit.gateway.served import echo_model
from tests.unit.gateway.test_tools import HELLO, chat, streamed, whole

THINKS = "<|channel|>analysis<|message|>Need the weather.<|end|>"
ASSISTANT = "<|start|>assistant"
CITY = '{"city": "Rome"}'
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{CITY}"
EARLY_CALL = f" to=functions.weather<|channel|>commentary json<|message|>{CITY}"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>"
FINAL = "<|channel|>final<|message|>Warm <b>and</b> dry."

Said = tuple[str, str, list[tuple[str, str]]]
"""Thoughts, content, and calls with their arguments."""


def read(pieces: list[str], begun: str = "") -> Said:
    form = MessageForm(lambda: HarmonyParser(begun), lambda: ToolParser(NOTATIONS["openai"].script))
    reader, said = MessageReader(form), ["", ""]
    calls: list[tuple[str, str]] = []
    for number, text in enumerate(pieces, 1):
        piece = Piece(text, finish="stop" if number == len(pieces) else None)
        reader.read(piece)
        said[0] += piece.reasoning
        said[1] += piece.text
        for delta in piece.calls:
            if delta.name is not None:
                calls.append((delta.name, ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return said[0], said[1], calls


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FINAL, ("", "Warm <b>and</b> dry.", [])),
        (f"{THINKS}{ASSISTANT}{FINAL}", ("Need the weather.", "Warm <b>and</b> dry.", [])),
        (f"{THINKS}{ASSISTANT}{CALL}", ("Need the weather.", "", [("weather", CITY)])),
        (f"{THINKS}{ASSISTANT}{EARLY_CALL}", ("Need the weather.", "", [("weather", CITY)])),
        (EARLY_CALL, ("", "", [("weather", CITY)])),
        (
            f"{THINKS}{ASSISTANT}{PREAMBLE}{ASSISTANT}{CALL}",
            ("Need the weather.", "I look.", [("weather", CITY)]),
        ),
        (
            f"{THINKS}{ASSISTANT}{THINKS}{ASSISTANT}{FINAL}<|return|>",
            ("Need the weather.\n\nNeed the weather.", "Warm <b>and</b> dry.", []),
        ),
        (
            f"{CALL}<|call|>{ASSISTANT}{CALL}<|call|>",
            ("", "", [("weather", CITY), ("weather", CITY)]),
        ),
        # What another tool would be asked, in the channel of thoughts.
        (
            "<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
            ("1 + 1", "", []),
        ),
        # Cut within a header, and within a call.
        (f"{THINKS}{ASSISTANT}<|channel|>fin", ("Need the weather.", "", [])),
        (f"{CALL[:-2]}", ("", "", [("weather", CITY[:-2])])),
        # No messages at all.
        ("Hello <|there|>.", ("", "Hello <|there|>.", [])),
        ("assist", ("", "assist", [])),
        ("", ("", "", [])),
        ("<|start|>" + "x" * 300, ("", "<|start|>" + "x" * 300, [])),
    ],
)
def test_messages_are_parted_by_their_channels(text: str, said: Said) -> None:
    assert read([text]) == said
    assert read(list(text) or [""]) == said
    for at in range(0, len(text), 1 + len(text) // 100):
        assert read([text[:at], text[at:]]) == said


FRAGMENTS = [
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>",
    "assistant", "analysis", "final", "commentary", " to=functions.weather", " to=python", CITY,
    THINKS, CALL, PREAMBLE, FINAL, ASSISTANT, "<", "<|", "|>", "{", "}", " ", "\n", "a", "x" * 200,
]  # fmt: skip


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.randoms(use_true_random=False),
)
def test_any_text_is_the_same_in_any_pieces(text: str, draw: random.Random) -> None:
    cuts = sorted(draw.sample(range(len(text) + 1), min(4, len(text) + 1)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text]) == read(list(text) or [""])


@pytest.mark.parametrize(
    ("before", "goes_on", "text", "said"),
    [
        (
            "<|start|>user<|message|>Hi<|end|><|start|>assistant",
            False,
            FINAL,
            ("", "Warm <b>and</b> dry."),
        ),
        ("<|start|>assistant<|channel|>analysis<|message|>", False, "So.<|end|>", ("So.", "")),
        ("<|start|>assistant<|channel|>final", False, "<|message|>So.", ("", "So.")),
        ("The answer is", True, " 4.", ("", " 4.")),
    ],
)
def test_a_prompt_may_hold_the_beginning(
    before: str, goes_on: bool, text: str, said: tuple[str, str]
) -> None:
    parser = Harmony().reader(before, goes_on)()
    thoughts = [parser.push(text), parser.finish()]
    assert tuple(map("".join, zip(*thoughts, strict=True))) == said


def test_tokens_of_thoughts_are_counted() -> None:
    reader = MessageReader(MessageForm(HarmonyParser))
    for text in ("<|channel|>", "analysis", "<|message|>", "So", ".", "<|end|>", FINAL, "!"):
        reader.read(Piece(text, tokens=[1]))
    assert reader.thought_tokens == 4  # the mark behind the header, two of text, the end


def test_a_chat_says_what_was_thought_and_called() -> None:
    served = replace(test_tools.model("openai", "openai_gptoss"))
    text = f"{THINKS}{ASSISTANT}{PREAMBLE}{ASSISTANT}{CALL}"
    choice: dict[str, Any] = whole(chat(served), text)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("Need the weather.", "I look.")
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "weather",
        {"city": "Rome"},
    )
    parts = streamed(chat(served, stream=True), text)
    assert parts["message"]["content"] == "I look."
    assert parts["message"]["reasoning_content"] == "Need the weather."
    plain = whole(chat(served, messages=HELLO, tools=None), f"{THINKS}{ASSISTANT}{FINAL}")
    assert plain["message"]["content"] == "Warm <b>and</b> dry."
    cut = whole(chat(served), THINKS[:-12], Finish.LENGTH)
    assert cut["message"]["content"] in (None, "")


def spoken() -> ServedModel:
    return replace(echo_model(), tool_call_parser="openai", reasoning_parser="openai_gptoss")


def test_responses_have_an_item_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_response_stream, "model", spoken)
    text, body = f"{THINKS}{ASSISTANT}{PREAMBLE}{ASSISTANT}{CALL}", test_response_stream.body()
    answer = test_response_stream.whole(test_response_stream.understood(body), text)
    *_, (_, last) = test_response_stream.streamed(body, text)
    for output in (answer["output"], last["response"]["output"]):
        thought, said, call = output
        assert thought["content"][0]["text"] == "Need the weather."
        assert said["content"][0]["text"] == "I look."
        assert (call["name"], call["arguments"]) == ("weather", CITY)


def test_messages_have_a_block_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_messages_stream, "model", spoken)
    text, body = f"{THINKS}{ASSISTANT}{PREAMBLE}{ASSISTANT}{CALL}", test_messages_stream.body()
    answer = test_messages_stream.whole(test_messages_stream.understood(body), text)
    events = [event for _, event in test_messages_stream.streamed(body, text)]
    for message in (answer, test_messages_stream.put_together(events)):
        thought, said, call = message["content"]
        assert (thought["thinking"], said["text"]) == ("Need the weather.", "I look.")
        assert (call["name"], call["input"]) == ("weather", {"city": "Rome"})
        assert message["stop_reason"] == "tool_use"
