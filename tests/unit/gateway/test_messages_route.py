"""/v1/messages over real HTTP: what its document says, its errors, its headers, and its models."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import jsonschema
import pytest

from pagefleet.wire import Reason
from pagefleet_gateway.http.openapi import document
from pagefleet_worker.prepare import prepare
from tests.unit.gateway.test_app import Cell, running_cell, wait_until

ROUTE = "/v1/messages"
SAID = [{"role": "user", "content": "hello"}]
DOCUMENT: Any = json.loads(document())
ASKED: dict[str, Any] = {"model": "echo", "messages": SAID, "max_tokens": 9}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    folder = tmp_path_factory.mktemp("cell")
    with running_cell(prepare("echo", folder), folder, "--shutdown-timeout=0.3") as cell:
        yield cell


def content_of(document: Any, path: str = ROUTE, status: str = "200") -> Any:
    return document["paths"][path]["post"]["responses"][status]["content"]


def events(response: httpx.Response) -> list[Any]:
    """What a stream tells; each event has its name, and there is no other end than the last."""
    *written, rest = "".join(response.iter_text()).split("\n\n")
    assert rest == ""
    lines = [dict(line.split(": ", 1) for line in event.split("\n")) for event in written]
    told = [json.loads(each["data"]) for each in lines]
    assert [each["event"] for each in lines] == [each["type"] for each in told]
    return told


def error_of(response: httpx.Response) -> Any:
    """The error, if it has the form of this API."""
    told = response.json()
    jsonschema.validate(
        told,
        DOCUMENT | content_of(DOCUMENT, status="default")["application/json"]["schema"],
    )
    assert told["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return told["error"]


def test_an_answer_is_what_its_document_says(cell: Cell) -> None:
    response = cell.post(f"{ROUTE}?beta=true", **ASKED, zork=1, speed="fast")
    assert response.headers["x-ignored-fields"] == "zork, speed"
    answer = response.json()
    assert answer["id"] == "msg_" + response.headers["request-id"]
    assert answer["usage"]["output_tokens"] == 9
    jsonschema.validate(answer, DOCUMENT | content_of(DOCUMENT)["application/json"]["schema"])
    chat = cell.post("/v1/chat/completions", messages=SAID, max_tokens=9).json()
    (block,) = answer["content"]
    assert block["text"] == chat["choices"][0]["message"]["content"]
    assert block["citations"] == []
    usage = answer["usage"]
    read = usage["cache_read_input_tokens"]
    assert usage["input_tokens"] + read == chat["usage"]["prompt_tokens"]
    assert read == chat["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_events_are_what_its_document_says(cell: Cell) -> None:
    item = content_of(DOCUMENT)["text/event-stream"]["itemSchema"]
    with cell.stream(ROUTE, **ASKED) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        answers = events(response)
    assert [each["type"] for each in answers[-3:]] == [
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    for each in answers:
        jsonschema.validate(each, DOCUMENT | item["properties"]["data"]["contentSchema"])


def test_a_stream_goes_on_behind_an_id(cell: Cell) -> None:
    with cell.stream(ROUTE, **ASKED, seed=3) as response:
        written = response.read().decode().split("\n\n")[:-1]
    for cut, event in enumerate(written, 1):
        name = event.split("\n")[1].removeprefix("id: ")
        with cell.stream(ROUTE, {"Last-Event-ID": name}, **ASKED, seed=3) as response:
            rest = response.read().decode().split("\n\n")[:-1]
        assert [each.split("\n")[2] for each in rest] == [
            each.split("\n")[2] for each in written[cut:]
        ]


def test_a_prompt_is_counted(cell: Cell) -> None:
    usage = cell.post(ROUTE, **ASKED).json()["usage"]
    counted = cell.post(f"{ROUTE}/count_tokens", model="echo", messages=SAID)
    assert counted.json() == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
    }
    refused = cell.post(f"{ROUTE}/count_tokens", messages=[])
    assert (refused.status_code, error_of(refused)["type"]) == (400, "invalid_request_error")


def test_errors_have_the_form_of_this_api(cell: Cell) -> None:
    assert error_of(cell.post(ROUTE, **ASKED, temperature=3)) == {
        "type": "invalid_request_error",
        "message": "temperature is not acceptable: Expected `float` <= 2.0.",
    }
    other = cell.post(ROUTE, **ASKED | {"model": "other"})
    assert (other.status_code, error_of(other)["type"]) == (404, "not_found_error")
    assert error_of(other)["details"] == {"error_code": "model_not_found"}
    long = cell.post(ROUTE, **ASKED | {"messages": [{"role": "user", "content": "a" * 5000}]})
    assert (long.status_code, error_of(long)["type"]) == (400, "invalid_request_error")
    assert error_of(long)["message"].startswith("prompt is too long: This model's maximum")
    threaded = cell.post(ROUTE, **ASKED, thread={"type": "create"})
    assert (threaded.status_code, error_of(threaded)["type"]) == (400, "invalid_request_error")
    assert error_of(threaded)["details"] == {"error_code": "thread_unsupported_request"}
    large = httpx.post(cell.url + ROUTE, content=b"x" * (2**21 + 1))
    assert (large.status_code, error_of(large)["type"]) == (413, "request_too_large")
    method = httpx.get(cell.url + ROUTE)
    assert (method.status_code, method.headers["allow"]) == (405, "POST")
    assert error_of(method)["type"] == "invalid_request_error"
    nowhere = cell.post(f"{ROUTE}/batches")
    assert (nowhere.status_code, error_of(nowhere)["type"]) == (404, "not_found_error")


def test_who_names_a_version_of_this_api_gets_its_errors_everywhere(cell: Cell) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    unknown = httpx.get(f"{cell.url}/v1/models/other", headers=headers)
    assert (unknown.status_code, error_of(unknown)["type"]) == (404, "not_found_error")
    plain = httpx.get(f"{cell.url}/v1/models/other")
    assert "request-id" not in plain.headers
    assert plain.json()["error"]["code"] == "model_not_found"


REFUSALS = [
    (Reason.OVERLOADED, 503, "overloaded_error"),
    (Reason.NO_WORKER, 503, "overloaded_error"),
    (Reason.FAILED, 500, "api_error"),
    (Reason.MOVED, 409, "conflict_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("reason", "status", "kind"), REFUSALS)
def test_a_refusal_before_the_first_event_is_a_status(
    cell: Cell, stream: bool, reason: Reason, status: int, kind: str
) -> None:
    cell.scheduler.reject = reason
    response = cell.post(ROUTE, **ASKED, stream=stream)
    cell.scheduler.reject = None
    assert (response.status_code, error_of(response)["type"]) == (status, kind)
    assert ("retry-after" in response.headers) == (status == 503)


def test_models_are_listed_for_clients_of_both_apis(cell: Cell) -> None:
    listed = httpx.get(f"{cell.url}/v1/models").json()
    (model,) = listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "echo", "echo")
    assert (model["type"], model["display_name"]) == ("model", "echo")
    created = datetime.fromtimestamp(model["created"], UTC)
    assert datetime.fromisoformat(model["created_at"]) == created


def test_draining_fails_what_does_not_end(cell: Cell) -> None:
    """The last of this file: it ends the gateway."""
    cell.scheduler.step_seconds = 0.02
    asked = ASKED | {"max_tokens": 1000, "ignore_eos": True}
    with cell.stream(ROUTE, **asked) as response:
        wait_until(lambda: bool(cell.scheduler.running))
        cell.process.terminate()
        *_, error = events(response)
    assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
    assert error["error"]["details"] == {"error_code": "overloaded"}
