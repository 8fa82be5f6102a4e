"""A stream that is cut anywhere and resumed is the stream that was not cut."""

import dataclasses
import json
import random
from typing import Any
from zlib import crc32

import pytest
from msgspec.structs import replace

from pagefleet.wire import ChoiceState, Finish, Output, pack_ints, unpack_ints
from pagefleet_gateway.cell.link import News
from pagefleet_gateway.cell.submission import OpenSubmission
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.rendering.stream import DONE, Renderer
from pagefleet_gateway.requests.generation import Generation, Limits, resumed, ticket_of
from pagefleet_gateway.requests.understanding import understand_chat, understand_completion
from pagefleet_gateway.resume import (
    MOST_CHOICES,
    Had,
    Ticket,
    event_id,
    position,
    read_event_id,
)
from tests.unit.gateway.fake_scheduler import logprobs_of
from tests.unit.gateway.served import echo_model

SECRET, TENANT = b"secret", b"tenant"
TEXT = "Grüße 👩‍🚀 und mehr END davon"


def understood(body: bytes, chat: bool) -> Generation:
    understand = understand_chat if chat else understand_completion
    return understand(body, echo_model(), Limits(max_model_len=4096))


def news_of(generation: Generation, draw: random.Random, text: str = TEXT) -> list[News]:
    """What a scheduler sends for each choice that goes on, in pieces of any size."""
    news: list[News] = []
    width = generation.params.logprobs
    for submit in generation.unfinished:
        for choice in submit.choices:
            tokens = list(f"{choice.index}{text}".encode())
            at = 0
            while at < len(tokens) and not choice.finished:
                piece = tokens[at : at + draw.randint(1, 9)]
                last = at + len(piece) == len(tokens)
                logprobs = None if width is None else logprobs_of(piece, width)
                finish = Finish.LENGTH if last else None
                news.append(
                    Output(submit.request, 1, choice.index, at, pack_ints(piece), logprobs, finish)
                )
                at += len(piece)
    return news


def events(
    body: bytes, chat: bool, last_id: str | None = None, text: str = TEXT
) -> list[tuple[str, Any]]:
    """(id, chunk) of the events of a stream, from the beginning or behind an id."""
    generation = understood(body, chat)
    if last_id is None:
        generation = dataclasses.replace(generation, created=5)
    else:
        generation = resumed(
            generation, echo_model(), *read_event_id(last_id, SECRET, body, TENANT)
        )
    ticket = ticket_of(generation, echo_model(), TENANT).sign(SECRET, body)
    answer = Answer(generation, echo_model())
    renderer = Renderer(answer, echo_model(), ticket)
    content = renderer.start()
    news = news_of(generation, random.Random(random.randrange(2**32)), text)
    for item in news:
        if not answer.finished:
            content += renderer.events(answer.take([item]))
    if not news:
        content += renderer.events({})
    *parts, done, rest = content.split(b"\n\n")
    assert (done + b"\n\n", rest) == (DONE, b"")
    found = []
    for part in parts:
        *ids, data = part.decode().split("\n")
        identity = ids[0].removeprefix("id: ") if ids else ""
        found.append((identity, json.loads(data.removeprefix("data: "))))
    return found


def told(chunks: list[tuple[str, Any]]) -> dict[int, tuple[str, list[str], str | None]]:
    """Text, with who speaks in front in a chat, tokens and finish of each choice."""
    said: dict[int, tuple[str, list[str], str | None]] = {}
    for _, chunk in chunks:
        for choice in chunk["choices"]:
            text, tokens, finish = said.get(choice["index"], ("", [], None))
            delta = choice.get("delta", {})
            text += delta.get("role", "") + (choice.get("text") or delta.get("content") or "")
            logprobs = choice.get("logprobs") or {}
            tokens = tokens + (logprobs.get("tokens") or logprobs.get("content") or [])
            assert finish is None or choice["finish_reason"] is None
            said[choice["index"]] = text, tokens, choice["finish_reason"] or finish
    return said


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"stop": ["END"]},
        {"n": 2, "stop": ["davon"], "logprobs": 2},
        {"echo": True},
        {"echo": True, "n": 2},
    ],
)
def test_cut_behind_any_event(chat: bool, fields: dict[str, Any]) -> None:
    if chat:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}]}
        if "logprobs" in fields:
            fields = fields | {"logprobs": True, "top_logprobs": 2}
        if "echo" in fields:
            body["messages"].append({"role": "assistant", "content": "So"})
            fields = fields | {"continue_final_message": True, "add_generation_prompt": False}
    else:
        body = {"prompt": "ab"}
    sent = json.dumps(body | {"max_tokens": 999, "stream": True} | fields).encode()
    whole = events(sent, chat)
    begun = next(cut for cut, (identity, _) in enumerate(whole, 1) if identity)
    assert not any(chunk["choices"][0]["finish_reason"] for _, chunk in whole[:begun])
    for cut, (identity, chunk) in enumerate(whole[begun - 1 :], begun):
        rest = events(sent, chat, identity)
        assert told(whole[:cut] + rest) == told(whole)
        assert {(each["id"], each["created"]) for _, each in rest} <= {(chunk["id"], 5)}


@pytest.mark.parametrize("other", [TEXT[:3], "x" + TEXT[1:], TEXT[1:], TEXT[0] + "x" + TEXT[1:]])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": ["END"]}])
def test_a_stream_that_would_go_on_as_another_fails(fields: dict[str, Any], other: str) -> None:
    """As where the only worker left computes other bits than the one that is gone."""
    body = json.dumps({"prompt": "ab", "max_tokens": 999, "stream": True} | fields).encode()
    for identity, _ in events(body, chat=False):
        had = read_event_id(identity, SECRET, body, TENANT)[1].values()
        at = [each.count for each in had if not each.finished]
        spared = [
            len(f"0{TEXT[:same]}".encode()) for same in range(4) if other[:same] == TEXT[:same]
        ]
        if max(at, default=0) <= spared[-1]:
            continue
        with pytest.raises(ApiError) as caught:
            events(body, chat=False, last_id=identity, text=other)
        assert (caught.value.status, caught.value.code) == (410, "gone")


def test_the_seed_of_a_resumed_stream_is_the_first_one_s() -> None:
    body = json.dumps({"prompt": "ab", "stream": True}).encode()
    first = understood(body, chat=False)
    ticket = ticket_of(first, echo_model(), TENANT)
    name = event_id(ticket.sign(SECRET, body), [position(Had(3))])
    had = read_event_id(name, SECRET, body, TENANT)
    again = resumed(understood(body, chat=False), echo_model(), *had)
    assert again.params == first.params
    ((submit,), (before,)) = again.submits, first.submits
    assert submit.continues == before.request != submit.request
    assert submit == replace(before, request=submit.request, continues=submit.continues)


def test_what_cannot_be_resumed_is_said() -> None:
    body = json.dumps({"prompt": "ab", "stream": True, "n": 2}).encode()
    name = event_id(
        Ticket("x", 0, "y", 1, "z", TENANT).sign(SECRET, body),
        [position(Had(1, 5)), position(Had(2, 6, True, 7))],
    )
    ticket, had = read_event_id(name, SECRET, body, TENANT)
    assert (ticket.answer, had) == ("x", {0: Had(1, 5), 1: Had(2, 6, True, 7)})
    for text, secret, sent, tenant, status in (
        (name, SECRET, body, b"other", 403),
        (name, b"other", body, TENANT, 410),
        (name, SECRET, body + b" ", TENANT, 410),
        (name[:-4], SECRET, body, TENANT, 400),
        ("", SECRET, body, TENANT, 400),
        ("é.1", SECRET, body, TENANT, 400),
        ("x" * 7000, SECRET, body, TENANT, 400),
        (name[8:], SECRET, body, TENANT, 400),
    ):
        with pytest.raises(ApiError) as caught:
            read_event_id(text, secret, sent, tenant)
        assert caught.value.status == status, text
    with pytest.raises(ApiError) as caught:
        resumed(understood(body, chat=False), echo_model(), ticket, {0: Had(1), 1: Had(2)})
    assert caught.value.status == 410
    assert "another model" in caught.value.message
    ticket = ticket_of(understood(body, chat=False), echo_model(), TENANT)
    with pytest.raises(ApiError) as caught:
        resumed(understood(body, chat=False), echo_model(), ticket, {0: Had(1)})
    assert caught.value.status == 410
    assert "other choices" in caught.value.message


def test_the_longest_id_that_is_given_is_taken() -> None:
    answer, fingerprint, tenant = "chatcmpl-" + "🧭" * 128, "f" * 64, b"t" * 32
    ticket = Ticket(answer, 2**40, "r" * 32, 2**64 - 1, fingerprint, tenant)
    had = Had(10**9 - 1, 2**32 - 1, True, 2**32 - 1)
    name = event_id(ticket.sign(SECRET, b"body"), [position(had)] * MOST_CHOICES)
    taken = read_event_id(name, SECRET, b"body", tenant)
    assert taken == (ticket, dict.fromkeys(range(MOST_CHOICES), had))


def test_a_scheduler_is_told_what_computed_the_tokens_that_are_to_come_again() -> None:
    body = json.dumps({"prompt": "ab", "stream": True, "n": 3, "max_tokens": 9}).encode()
    generation, model = understood(body, chat=False), echo_model()
    ticket = ticket_of(generation, model, TENANT)
    answer, name = Answer(generation, model), ""
    renderer = Renderer(answer, model, ticket.sign(SECRET, body))
    request, a = generation.submits[0].request, pack_ints([97])
    for item in (
        Output(request, 1, 0, 0, a, numerics=5),
        Output(request, 1, 1, 0, a, finish=Finish.LENGTH, numerics=6),
        Output(request, 1, 0, 1, a, numerics=2**32 - 1),
    ):
        written = renderer.events(answer.take([item]))
        name = written.removeprefix(b"id: ").partition(b"\n")[0].decode()
    again = resumed(generation, model, *read_event_id(name, SECRET, body, TENANT))
    submit = OpenSubmission.of(again.submits[0], 0.0).handed_over(0.0)
    assert submit.choices == [
        ChoiceState(0, numerics=2**32 - 1),
        ChoiceState(1, finished=True, numerics=6),
        ChoiceState(2),
    ]


def test_unpacked_positions_count_tokens() -> None:
    """The id of the last event of a choice says all of its tokens, and that it has ended."""
    body = json.dumps({"prompt": "ab", "stream": True, "max_tokens": 999}).encode()
    chunks = events(body, chat=False)
    (had,) = read_event_id(chunks[-1][0], SECRET, body, TENANT)[1].values()
    news = news_of(understood(body, chat=False), random.Random(1))
    tokens = b"".join(item.tokens for item in news)  # type: ignore[union-attr]
    assert had == Had(len(unpack_ints(tokens)), crc32(tokens), True)
