"""A stream that is cut anywhere goes on over real HTTP, however long it is."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagefleet_gateway.bodies.bounds import STREAM_WINDOW
from pagefleet_gateway.resume import MOST_CHOICES
from pagefleet_worker.prepare import prepare
from tests.unit.gateway.test_app import Cell, running_cell, wait_until


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    folder = tmp_path_factory.mktemp("cell")
    with running_cell(prepare("echo", folder), folder) as cell:
        yield cell


def events(cell: Cell, body: dict[str, Any], last_id: str = "") -> list[tuple[str, Any]]:
    """(id, choice) of the events of a stream, from the beginning or behind an id."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with cell.stream(path, {"Last-Event-ID": last_id}, **body) as response:
        *written, done, rest = response.read().decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    pairs = [each.removeprefix("id: ").rsplit("data: ", 1) for each in written]
    return [(name.strip(), json.loads(data)["choices"][0]) for name, data in pairs]


@pytest.mark.parametrize("n", [1, 2])
def test_who_has_more_than_a_window_gets_the_rest(cell: Cell, n: int) -> None:
    """What it has is generated again, with nothing to send, for as long as that takes."""
    body = {"prompt": "a long stream", "max_tokens": 2 * STREAM_WINDOW, "seed": 1, "n": n}
    whole = events(cell, body)
    cuts = [n * STREAM_WINDOW, random.randrange(len(whole)), len(whole)]
    print("cut behind", cuts)
    for cut in cuts:
        got = whole[:cut] + events(cell, body, whole[cut - 1][0] if cut else "")
        for choice in range(n):
            texts = [
                "".join(each["text"] for _, each in told if each["index"] == choice)
                for told in (got, whole)
            ]
            assert texts[0] == texts[1]


@pytest.mark.parametrize("prompts", [MOST_CHOICES // 2, MOST_CHOICES // 2 + 1, 1024])
def test_what_events_take_does_not_grow_without_bound(cell: Cell, prompts: int) -> None:
    """Each names the position of every choice, so that of very many none is named."""
    told = events(cell, {"prompt": ["ab"] * prompts, "n": 2, "max_tokens": 3, "temperature": 1})
    assert sum(each["finish_reason"] == "length" for _, each in told) == 2 * prompts
    assert all(bool(name) == (2 * prompts <= MOST_CHOICES) for name, _ in told)


def said(chat: list[tuple[str, Any]]) -> str:
    return "".join(each["delta"].get("content", "") for _, each in chat)


def hold(cell: Cell, tokens: int) -> None:
    """Let workers hold sequences of so many tokens, and the gateway know it."""
    cell.scheduler.longest = tokens
    models = f"{cell.url}/v1/models"
    wait_until(lambda: httpx.get(models).json()["data"][0]["max_model_len"] == tokens)


def test_a_stream_goes_on_with_the_time_that_it_began_at(tmp_path: Path) -> None:
    """Its prompt says what time it is."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{{ strftime_now('%H:%M:%S') }}")
    body = {"messages": [{"role": "user", "content": "now: "}], "max_tokens": 40}
    model = prepare("echo", tmp_path)
    with running_cell(model, tmp_path, f"--chat-template={template}") as cell:
        whole = events(cell, body)
        last, second = len(whole) // 2, said(whole)[1::-1]  # the prompt comes back to front
        wait_until(lambda: time.strftime("%S") != second)
        assert said(events(cell, body, whole[last][0])) == said(whole[last + 1 :])


@pytest.mark.parametrize("fields", [{}, {"truncate_prompt_tokens": -1}, {"max_tokens": 20}])
def test_a_stream_is_as_long_as_it_began_whatever_workers_are_left(
    cell: Cell, fields: dict[str, Any]
) -> None:
    """Those that can hold less, or more, compute another prompt, or another end of the answer."""
    body = {"messages": [{"role": "user", "content": "abc" * 20}], "seed": 1} | fields
    hold(cell, 120)
    whole = events(cell, body)
    last = len(whole) // 2  # a slow machine puts many tokens into one event
    for now in (90, 400):
        hold(cell, now)
        rest = events(cell, body, whole[last][0])
        assert said(rest) == said(whole[last + 1 :])
    hold(cell, 4096)
