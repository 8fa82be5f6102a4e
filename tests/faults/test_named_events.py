"""Streams of /v1/responses and /v1/messages through deaths: every event and word as without."""

import json
import random
import re
from contextlib import suppress

import httpx
import pytest

from tests.faults.conftest import kill_gateway_at

TOKENS = 60
slow = pytest.mark.slow
WRITTEN = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 40, "maxLength": 80}},
    "required": ["text"],
    "additionalProperties": False,
}
WRITE = {"type": "function", "name": "write", "parameters": WRITTEN}
FORMS = {
    "text": {"ignore_eos": True, "temperature": 0.8},
    "logprobs": {
        "ignore_eos": True,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    },
    "call": {"tools": [WRITE], "tool_choice": "required", "parallel_tool_calls": False},
    "message": {"ignore_eos": True, "temperature": 0.8},
    "message that calls": {
        "tools": [{"name": "write", "input_schema": WRITTEN}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
}


@pytest.fixture
def ask():
    """Makes a body of some form; the answer's name and seed are in it."""
    seed = random.randrange(2**32)
    print("bodies of seed", seed)
    words = random.Random(seed).choices("abc def ghi", k=30)

    def ask(form):
        text = "".join(words)
        if form.startswith("message"):
            said = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
        else:
            said = {"input": text, "max_output_tokens": TOKENS}
        return {**said, "seed": seed, "stream": True, "request_id": "it", **FORMS[form]}

    return ask


def read(server, body, last_id="", watch=lambda events: None):
    """(id, data) of the events of a stream until it ends or breaks; `watch` sees them come."""
    events, name = [], ""
    route = "messages" if "messages" in body else "responses"
    url = f"http://{server.host}:{server.port}/v1/{route}"
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with (
        suppress(httpx.RemoteProtocolError, httpx.ReadError),
        httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("id: "):
                name = line.removeprefix("id: ")
            elif line.startswith("data: "):
                events.append((name, line.removeprefix("data: ")))
                watch(events)
    return events


def told(events):
    """What events say, but for when they were begun, and what a cache spared."""
    varies = r'("(created_at|cached_tokens|cache_read_input_tokens)":)\d+'
    computed = r'("input_tokens":)\d+(,"cache_creation)'
    return [re.sub(computed, r"\1 0\2", re.sub(varies, r"\1 0", data)) for _, data in events]


def at(count, act):
    """A watch that acts once so many events have come."""

    def watch(events):
        if len(events) == count:
            act()

    return watch


def assert_whole(events):
    """The numbers count the events, where they have some, and the last is the end."""
    names = [json.loads(data)["type"] for _, data in events]
    if names[0] == "message_start":
        assert names[-2:] == ["message_delta", "message_stop"]
        return
    numbers = [json.loads(data)["sequence_number"] for _, data in events]
    assert numbers == list(range(len(events)))
    last = json.loads(events[-1][1])
    assert last["type"] in ("response.completed", "response.incomplete")
    assert {
        json.loads(data).get("response", last["response"])["created_at"] for _, data in events
    } == {last["response"]["created_at"]}


@pytest.mark.parametrize(
    "form",
    [
        *("call", "message"),
        *(pytest.param(form, marks=slow) for form in ("text", "logprobs", "message that calls")),
    ],
)
def test_another_gateway_goes_on_with_the_next_number(cell, ask, form):
    body, counts = ask(form), cell.gateway_proxy.counts
    before = counts.get("Outputs", 0)
    known = read(cell.servers[1], body)
    assert_whole(known)
    cut = random.randrange(3, counts["Outputs"] - before - 3)
    print("cut at outputs", cut)
    first = read(cell.servers[0], body, watch=kill_gateway_at(cell, cut))
    rest = read(cell.servers[1], body, first[-1][0])
    cell.gateways[0].restart()
    assert len(first) < len(known)
    assert_whole(first + rest)
    assert told(first + rest) == told(known)


@pytest.mark.parametrize(
    ("who", "form"),
    [
        ("workers", "call"),
        ("scheduler", "logprobs"),
        ("workers", "message that calls"),
        pytest.param("scheduler", "message", marks=slow),
        pytest.param("workers", "logprobs", marks=slow),
        pytest.param("scheduler", "call", marks=slow),
    ],
)
def test_a_death_behind_the_gateway_is_not_seen(cell, ask, who, form):
    body = ask(form)
    known = read(cell.server, body)
    died = []

    def die():
        died.append(who)
        for service in cell.workers if who == "workers" else [cell.scheduler]:
            service.restart()

    events = read(cell.server, body, watch=at(random.randrange(3, len(known) - 6), die))
    assert died
    assert_whole(events)
    assert told(events) == told(known)
