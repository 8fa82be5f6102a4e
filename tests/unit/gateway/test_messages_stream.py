"""Answers of /v1/messages: their events follow from the tokens alone, and make up the whole."""

import json
import random
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from pagefleet.wire import Finish
from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.errors import ApiError, bad_request, unavailable
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.rendering.messages_stream import MessageRenderer
from pagefleet_gateway.requests.generation import Generation, Limits, resumed, ticket_of
from pagefleet_gateway.requests.messages_input import understand_message
from pagefleet_gateway.resume import read_event_id
from tests.unit.gateway.test_response_stream import (
    CALLS,
    NOTATION,
    PLAIN,
    SECRET,
    TENANT,
    TEXTS,
    THOUGHTS,
    model,
    news_of,
)

WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
BROKEN = 'Well. <tool_call>{"name": "weather", "arguments": {"city": Zürich}}</tool_call>'
TEXTS = {**TEXTS, "broken": BROKEN}


def body(**fields: Any) -> bytes:
    asked = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 900, "seed": 1}
    return json.dumps(asked | {"tools": [WEATHER]} | fields).encode()


def understood(content: bytes, limits: Limits | None = None) -> Generation:
    limits = limits or Limits(max_model_len=4096, request_id="it")
    return understand_message(content, model(), limits)


def whole(generation: Generation, text: str, finish: Finish = Finish.STOP) -> Any:
    """The answer in one body."""
    answer, pieces = Answer(generation, model()), list[Piece]()
    for item in news_of(generation, text, finish):
        pieces += answer.take([item]).values()
    return json.loads(MessageRenderer(answer, model()).whole({0: Piece.joined(pieces)}))


def streamed(
    content: bytes, text: str, finish: Finish = Finish.STOP, last_id: str | None = None
) -> list[tuple[str, Any]]:
    """(id, event) of a stream, from the beginning or behind an id."""
    generation = understood(content)
    if last_id is not None:
        ticket, had = read_event_id(last_id, SECRET, content, TENANT)
        generation = resumed(generation, model(), ticket, had)
    ticket = ticket_of(generation, model(), TENANT)
    answer = Answer(generation, model())
    renderer = MessageRenderer(answer, model(), ticket.sign(SECRET, content))
    written = renderer.start()
    for item in news_of(generation, text, finish):
        if not answer.finished:
            written += renderer.events(answer.take([item]))
    return parsed(written)


def parsed(written: bytes) -> list[tuple[str, Any]]:
    found = []
    assert written.decode().splitlines() == written.decode().split("\n")[:-1]
    for event in written.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        data = json.loads(lines["data"])
        assert lines["event"] == data["type"]
        found.append((lines.get("id", ""), data))
    return found


def put_together(events: list[Any]) -> Any:
    """The message that a client makes of events; blocks come one after another."""
    begin, *middle, delta, stop = events
    assert (begin["type"], delta["type"], stop) == (
        *("message_start", "message_delta"),
        {"type": "message_stop"},
    )
    message = begin["message"]
    assert (message["content"], message["usage"]["output_tokens"]) == ([], 0)
    written = ""
    for event in middle:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            written = ""
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if kind == "delta":
            match event["delta"].pop("type"):
                case "input_json_delta":
                    written += event["delta"]["partial_json"]
                case "signature_delta":
                    block["signature"] = event["delta"]["signature"]
                case "text_delta":
                    block["text"] += event["delta"]["text"]
                case "thinking_delta":
                    block["thinking"] += event["delta"]["thinking"]
        elif kind == "stop" and block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = given_to(written)
    return {**message, **delta["delta"], "usage": delta["usage"]}


def given_to(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return {"INVALID_JSON": arguments}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
@pytest.mark.parametrize("fields", [{}, {"stop_sequences": ["then"]}, {"tools": []}])
def test_a_stream_is_the_whole_answer(name: str, finish: Finish, fields: dict[str, Any]) -> None:
    text, content = TEXTS[name], body(**fields)
    events = [event for _, event in streamed(content, text, finish)]
    again = [event for _, event in streamed(content, text, finish)]
    assert again == events, "in other pieces"
    message = whole(understood(content), text, finish)
    assert put_together(events) == message


@pytest.mark.parametrize("name", TEXTS)
def test_cut_behind_any_event(name: str) -> None:
    content = body(stream=True)
    events = streamed(content, TEXTS[name])
    for cut, (identity, _) in enumerate(events, 1):
        rest = streamed(content, TEXTS[name], last_id=identity)
        assert [event for _, event in rest] == [event for _, event in events[cut:]]
        assert [at.partition(".")[2] for at, _ in rest] == [
            at.partition(".")[2] for at, _ in events[cut:]
        ]
    (had,) = read_event_id(events[-1][0], SECRET, content, TENANT)[1].values()
    assert (had.count, had.finished) == (len(events), True)
    (had,) = read_event_id(events[-2][0], SECRET, content, TENANT)[1].values()
    assert not had.finished


@pytest.mark.parametrize("text", ["Another text", "a"])
def test_a_stream_that_would_go_on_as_another_fails(text: str) -> None:
    content = body(stream=True)
    for identity, _ in streamed(content, "One text that is long")[1:-1]:
        with pytest.raises(ApiError) as caught:
            streamed(content, text, last_id=identity)
        assert (caught.value.status, caught.value.code) == (410, "gone")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(NOTATION), max_size=12), st.randoms())
def test_any_text_in_any_pieces(parts: list[str], draw: random.Random) -> None:
    text, content = "".join(parts), body(stream=True)
    events = streamed(content, text)
    cut = draw.randint(1, len(events))
    rest = streamed(content, text, last_id=events[cut - 1][0])
    assert [event for _, event in events[:cut] + rest] == [event for _, event in events]
    assert put_together([event for _, event in events]) == whole(understood(content), text)


def test_content_in_its_order() -> None:
    message = whole(understood(body()), THOUGHTS)
    thoughts, said, call, again, _, last = message["content"]
    assert thoughts == {
        "type": "thinking",
        "thinking": "Well, 1 < 2.",
        "signature": sha256(b"Well, 1 < 2.").hexdigest(),
    }
    assert (said["text"].strip(), again["text"], last["text"]) == (
        *("Yes: Let me see.", "And", "then."),
    )
    assert (call["name"], call["input"]) == ("weather", {"city": "Zürich"})
    assert message["stop_reason"] == "tool_use"
    ids = [block["id"] for block in message["content"] if "id" in block]
    assert len(set(ids)) == 2
    thinking = len("<think>Well, 1 < 2.</think>") - len("<think>") + 1
    total = message["usage"].pop("input_tokens") + message["usage"]["cache_read_input_tokens"]
    assert total == len(understood(body()).prompts[0])
    constant = ("cache_creation", "inference_geo", "server_tool_use", "service_tier")
    assert [message["usage"].pop(name) for name in constant] == [None, None, None, "standard"]
    assert message["usage"] == {
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": len(THOUGHTS.encode()) + 1,
        "output_tokens_details": {"thinking_tokens": thinking},
    }
    hidden = body(thinking={"type": "adaptive", "display": "omitted"})
    assert [block["type"] for block in whole(understood(hidden), THOUGHTS)["content"]] == [
        *("text", "tool_use", "text", "tool_use", "text"),
    ]


def test_what_is_no_object_is_shown_as_it_was() -> None:
    message = whole(understood(body()), BROKEN)
    assert message["content"][1]["input"] == {"INVALID_JSON": '{"city": Zürich}'}
    cut = whole(understood(body()), CALLS[: CALLS.index("Z")], Finish.LENGTH)
    assert cut["content"][1]["input"] == {"INVALID_JSON": '{"city": "'}


ENDS: list[tuple[Finish, str, dict[str, Any], Any]] = [
    (Finish.STOP, PLAIN, {}, ("end_turn", None)),
    (Finish.STOP, PLAIN, {"stop_sequences": ["x", "mehr"]}, ("stop_sequence", "mehr")),
    (Finish.STOP, "a", {"stop_token_ids": [97]}, ("end_turn", None)),
    (Finish.STOP, CALLS, {}, ("tool_use", None)),
    (Finish.STOP, CALLS, {"stop_sequences": ["Zür"]}, ("stop_sequence", "Zür")),
    (Finish.LENGTH, "abc", {"max_tokens": 3}, ("max_tokens", None)),
    (Finish.LENGTH, "abc", {"max_tokens": 4}, ("model_context_window_exceeded", None)),
    (Finish.TIMEOUT, "a" * 20, {}, ("timeout", None)),
]


@pytest.mark.parametrize(("finish", "text", "fields", "reason"), ENDS)
def test_why_it_ended(finish: Finish, text: str, fields: dict[str, Any], reason: Any) -> None:
    generation = understood(body(**fields))
    message = whole(generation, text, finish)
    assert (message["stop_reason"], message["stop_sequence"]) == reason
    assert (message["id"], message["model"]) == ("msg_it", "echo")


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.TIMEOUT])
def test_a_strict_server_knows_few_ends(finish: Finish) -> None:
    generation = understood(body(), Limits(max_model_len=4096, strict=True))
    assert whole(generation, "a" * 20, finish)["stop_reason"] == "max_tokens"


def test_a_stream_that_ends_before_its_reader_was_there_fails() -> None:
    content = body(stream=True)
    name = streamed(content, PLAIN)[-5][0]
    ticket, had = read_event_id(name, SECRET, content, TENANT)
    generation = resumed(understood(content), model(), ticket, had)
    answer = Answer(generation, model())
    renderer = MessageRenderer(answer, model(), "ticket")
    *news, last = news_of(generation, PLAIN[:9], Finish.LENGTH)
    assert renderer.start() == renderer.events(answer.take(news)) == b""
    with pytest.raises(ApiError) as caught:
        renderer.events(answer.take([replace_struct(last, finish=Finish.TIMEOUT)]))
    assert caught.value.code == "deadline_exceeded"


def test_a_failure_is_the_end_and_has_no_id() -> None:
    generation = understood(body(stream=True))
    for error, kind in (
        (unavailable("No more.", "draining"), "overloaded_error"),
        (bad_request("No."), "invalid_request_error"),
    ):
        answer = Answer(generation, model())
        renderer = MessageRenderer(answer, model(), "ticket")
        written = renderer.start() + renderer.events(answer.take(news_of(generation, PLAIN)[:2]))
        *before, (name, told) = parsed(written + renderer.failure(error))
        assert [identity.partition(":")[0] for identity, _ in before] == [
            f"ticket.{n}" for n in range(1, len(before) + 1)
        ]
        assert (name, told["type"]) == ("", "error")
        assert (told["error"]["type"], told["error"]["message"]) == (kind, error.message)


def test_a_prefix_of_unknown_length_was_cached_at_first() -> None:
    """The last usage counts: the first is told before anything is known, if nothing comes."""
    generation = replace(understood(body()), created=5)
    answer = Answer(generation, model())
    renderer = MessageRenderer(answer, model())
    ((_, begun),) = parsed(renderer.start())
    events = parsed(renderer.events(answer.take(news_of(generation, ""))))
    first, last = begun["message"]["usage"], events[-2][1]["usage"]
    assert first["input_tokens"] == last["input_tokens"] + 1 == len(generation.prompts[0])
    assert (first["cache_read_input_tokens"], last["cache_read_input_tokens"]) == (0, 1)
