"""Answers of /v1/responses: their events follow from the tokens alone, and so do their numbers."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from pagefleet.wire import Finish, Output, pack_ints
from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.cell.link import News
from pagefleet_gateway.errors import ApiError, bad_request, unavailable
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.rendering.response_stream import ResponseRenderer
from pagefleet_gateway.requests.generation import Generation, Limits, resumed, ticket_of
from pagefleet_gateway.requests.response_input import understand_response
from pagefleet_gateway.resume import read_event_id
from tests.unit.gateway.fake_scheduler import logprobs_of
from tests.unit.gateway.openai_types import checked_event, checked_response
from tests.unit.gateway.served import echo_model

END = echo_model().manifest.eos_token_ids[-1]
SECRET, TENANT = b"secret", b"tenant"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}

PLAIN = "Grüße 👩‍🚀 und mehr."
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    'And <tool_call>{"name": "weather", "arguments": {}}</tool_call> then.'
)
THOUGHTS = "<think>Well, 1 < 2.</think>\n\nYes: " + CALLS
TEXTS = {
    "plain": PLAIN,
    "empty": "",
    "calls": CALLS,
    "thoughts": THOUGHTS,
    "thoughts alone": "<think>Well",
}


def model() -> ServedModel:
    return replace(echo_model(), tool_call_parser="hermes", reasoning_parser="qwen3")


def body(**fields: Any) -> bytes:
    return json.dumps({"input": "ab", "tools": [WEATHER], "seed": 1} | fields).encode()


def understood(content: bytes, limits: Limits | None = None) -> Generation:
    limits = limits or Limits(max_model_len=4096, request_id="it")
    return replace(understand_response(content, model(), limits), created=5)


def news_of(generation: Generation, text: str, finish: Finish = Finish.STOP) -> list[News]:
    """What a scheduler sends, in messages of any size."""
    (submit,) = generation.submits
    tokens = list(text.encode()) + ([END] if finish is Finish.STOP else [])
    width, at, news = generation.params.logprobs, 0, list[News]()
    while at < len(tokens) or not news:
        piece = tokens[at : at + random.randint(1, 9)]
        logprobs = None if width is None else logprobs_of(piece, width)
        end = finish if at + len(piece) == len(tokens) else None
        news.append(Output(submit.request, 1, 0, at, pack_ints(piece), logprobs, end, cached=1))
        at += len(piece)
    return news


def whole(generation: Generation, text: str, finish: Finish = Finish.STOP) -> Any:
    """The answer in one body."""
    answer, pieces = Answer(generation, model()), list[Piece]()
    for item in news_of(generation, text, finish):
        pieces += answer.take([item]).values()
    written = ResponseRenderer(answer, model()).whole({0: Piece.joined(pieces)})
    return checked_response(json.loads(written))


def streamed(
    content: bytes, text: str, finish: Finish = Finish.STOP, last_id: str | None = None
) -> list[tuple[str, Any]]:
    """(id, event) of a stream, from the beginning or behind an id."""
    generation = understood(content)
    if last_id is not None:
        ticket, had = read_event_id(last_id, SECRET, content, TENANT)
        generation = resumed(replace(generation, created=9), model(), ticket, had)
    ticket = ticket_of(generation, model(), TENANT)
    answer = Answer(generation, model())
    renderer = ResponseRenderer(answer, model(), ticket.sign(SECRET, content))
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
        data = checked_event(json.loads(lines["data"]))
        assert lines["event"] == data["type"]
        found.append((lines.get("id", ""), data))
    return found


def put_together(events: list[Any]) -> list[Any]:
    """The output that a client makes of deltas; items are as whole in the end as they grew."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
        if kind == "content_part.added":
            items[event["output_index"]]["content"].append(dict(event["part"]))
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            part = items[event["output_index"]]["content"][event["content_index"]]
            part["text"] += event["delta"]
            if "logprobs" in event:
                part["logprobs"] = part["logprobs"] + event["logprobs"]
        elif kind == "function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == items[-1]["content"][0]["text"]
        elif kind == "content_part.done":
            assert event["part"] == items[-1]["content"][0]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == items[-1]["arguments"]
        elif kind == "output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert event["item"] == items[-1]
    return items


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
@pytest.mark.parametrize("fields", [{}, LOGPROBS, {"stop": ["then"]}, {"tools": []}])
def test_a_stream_is_the_whole_answer(name: str, finish: Finish, fields: dict[str, Any]) -> None:
    text, content = TEXTS[name], body(**fields)
    events = [event for _, event in streamed(content, text, finish)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"] == whole(understood(content), text, finish)
    assert put_together(events) == last["response"]["output"]
    assert [event for _, event in streamed(content, text, finish)] == events, "in other pieces"


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("fields", [{}, LOGPROBS])
def test_cut_behind_any_event(name: str, fields: dict[str, Any]) -> None:
    content = body(stream=True, **fields)
    events = streamed(content, TEXTS[name])
    for cut, (identity, _) in enumerate(events, 1):
        rest = streamed(content, TEXTS[name], last_id=identity)
        assert [event for _, event in rest] == [event for _, event in events[cut:]]
        assert [at.partition(".")[2] for at, _ in rest] == [
            at.partition(".")[2] for at, _ in events[cut:]
        ]
    (had,) = read_event_id(events[-1][0], SECRET, content, TENANT)[1].values()
    assert (had.count, had.finished) == (len(events), True)


@pytest.mark.parametrize("text", ["Another text", "a"])
def test_a_stream_that_would_go_on_as_another_fails(text: str) -> None:
    """Once it comes to where its reader is; what the reader has of no token is made again."""
    content = body(stream=True)
    for identity, _ in streamed(content, "One text that is long")[:-1]:
        (had,) = read_event_id(identity, SECRET, content, TENANT)[1].values()
        if not had.digest:
            assert streamed(content, text, last_id=identity)[-1][1]["type"] == "response.completed"
            continue
        with pytest.raises(ApiError) as caught:
            streamed(content, text, last_id=identity)
        assert (caught.value.status, caught.value.code) == (410, "gone")


CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
NOTATION = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    CALL[:9],
    "a",
    "é",
    " ",
    "\n",
    "\u2028",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(NOTATION), max_size=12), st.booleans(), st.randoms())
def test_any_text_in_any_pieces(parts: list[str], shows: bool, draw: random.Random) -> None:
    text, content = "".join(parts), body(stream=True, **LOGPROBS if shows else {})
    events = streamed(content, text)
    response = events[-1][1]["response"]
    assert response == whole(understood(content), text)
    assert put_together([event for _, event in events]) == response["output"] != []
    cut = draw.randint(1, len(events))
    rest = streamed(content, text, last_id=events[cut - 1][0])
    assert [event for _, event in events[:cut] + rest] == [event for _, event in events]


def test_output_in_its_order() -> None:
    answer = whole(understood(body()), THOUGHTS)
    assert [item["type"] for item in answer["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "message",
        "function_call",
        "message",
    ]
    thoughts, said, call, *_ = answer["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Well, 1 < 2."}]
    assert said["content"][0]["text"].strip() == "Yes: Let me see."
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Zürich"}')
    assert len({item["id"] for item in answer["output"]}) == 6
    assert len({item["call_id"] for item in answer["output"] if "call_id" in item}) == 2
    thinking = len("<think>Well, 1 < 2.</think>") - len("<think>") + 1
    assert answer["usage"] == {
        "input_tokens": answer["usage"]["input_tokens"],
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": len(THOUGHTS.encode()) + 1,
        "output_tokens_details": {"reasoning_tokens": thinking},
        "total_tokens": answer["usage"]["input_tokens"] + len(THOUGHTS.encode()) + 1,
    }


def test_logprobs_stand_beside_the_text_of_their_tokens() -> None:
    answer = whole(understood(body(**LOGPROBS)), "<think>Well.</think>Yes.", Finish.LENGTH)
    _, said = answer["output"]
    (part,) = said["content"]
    tokens = [entry["token"] for entry in part["logprobs"]]
    assert "".join(tokens).endswith(part["text"])
    assert "".join(tokens).removesuffix(part["text"]) in ("", "</think>")
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}


ENDS: list[tuple[Finish, bool, str, str | None]] = [
    (Finish.STOP, False, "completed", None),
    (Finish.LENGTH, False, "incomplete", "max_output_tokens"),
    (Finish.TIMEOUT, False, "incomplete", "timeout"),
    (Finish.TIMEOUT, True, "incomplete", "max_output_tokens"),
]


@pytest.mark.parametrize(("finish", "strict", "status", "reason"), ENDS)
def test_how_it_ended(finish: Finish, strict: bool, status: str, reason: str | None) -> None:
    generation = understood(body(), Limits(max_model_len=4096, strict=strict))
    answer = Answer(generation, model())
    news = news_of(generation, "a" * 20, Finish.LENGTH)
    (piece,) = answer.take([*news[:-1], replace_struct(news[-1], finish=finish)]).values()
    ended = json.loads(ResponseRenderer(answer, model()).whole({0: piece}))
    assert ended["status"] == ended["output"][0]["status"] == status
    assert (ended["incomplete_details"] or {}).get("reason") == reason


def test_fields_come_back() -> None:
    given: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 30,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "key",
        "reasoning": {"effort": "low", "summary": None},
        "safety_identifier": "somebody",
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": {"type": "function", "name": "weather"},
        "top_logprobs": 2,
        "top_p": 0.5,
        "user": "me",
    }
    answer = whole(understood(body(**LOGPROBS | given)), "{}")
    assert {name: answer[name] for name in given} == given
    assert answer["tools"] == [{**WEATHER, "description": None, "strict": None}]
    assert (answer["id"], answer["created_at"], answer["store"]) == ("resp_it", 5, False)


def test_a_failure_is_the_end_and_has_no_id() -> None:
    content = body(stream=True)
    generation = understood(content)
    for error, code in (
        (unavailable("No more.", "draining"), "server_error"),
        (bad_request("No."), "invalid_prompt"),
    ):
        answer = Answer(generation, model())
        renderer = ResponseRenderer(answer, model(), "ticket")
        written = renderer.start() + renderer.events(answer.take(news_of(generation, PLAIN)[:2]))
        *before, (_, told), (_, failed) = parsed(written + renderer.failure(error))
        assert [identity.partition(":")[0] for identity, _ in before] == [
            f"ticket.{n}" for n in range(1, len(before) + 1)
        ]
        assert parsed(renderer.failure(error))[0][0] == ""
        assert (told["type"], told["code"], told["message"]) == ("error", error.code, error.message)
        assert failed["sequence_number"] == len(before) + 1
        assert failed["response"]["error"] == {"code": code, "message": error.message}
        assert failed["response"]["status"] == "failed"
