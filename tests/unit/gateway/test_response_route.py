"""/v1/responses over real HTTP: what its document says, its headers, and what it has not."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from pagefleet.wire import Reason
from pagefleet_worker.prepare import prepare
from tests.unit.gateway.openai_types import checked_event, checked_response
from tests.unit.gateway.test_app import Cell, error_of, running_cell, wait_until

ROUTE = "/v1/responses"
ASKED: dict[str, Any] = {"input": "hello", "max_output_tokens": 9}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    folder = tmp_path_factory.mktemp("cell")
    with running_cell(prepare("echo", folder), folder, "--shutdown-timeout=0.3") as cell:
        yield cell


def document(cell: Cell) -> Any:
    return httpx.get(f"{cell.url}/openapi.json").json()


def content_of(document: Any) -> Any:
    return document["paths"][ROUTE]["post"]["responses"]["200"]["content"]


def events(response: httpx.Response) -> list[Any]:
    """What a stream tells; each event has its name, and there is no other end than the last."""
    *written, rest = "".join(response.iter_text()).split("\n\n")
    assert rest == ""
    lines = [dict(line.split(": ", 1) for line in event.split("\n")) for event in written]
    told = [checked_event(json.loads(each["data"])) for each in lines]
    assert [each["event"] for each in lines] == [each["type"] for each in told]
    return told


def test_an_answer_is_what_its_document_says(cell: Cell) -> None:
    response = cell.post(ROUTE, **ASKED, zork=1, text={"verbosity": "low"})
    assert response.headers["x-ignored-fields"] == "zork, text.verbosity"
    answer = checked_response(response.json())
    assert answer["id"] == "resp_" + response.headers["x-request-id"]
    assert answer["usage"]["output_tokens"] == 9
    told = document(cell)
    jsonschema.validate(answer, told | content_of(told)["application/json"]["schema"])


def test_events_are_what_its_document_says(cell: Cell) -> None:
    told = document(cell)
    item = content_of(told)["text/event-stream"]["itemSchema"]
    schema = item["properties"]["data"]["contentSchema"]
    with cell.stream(ROUTE, **ASKED) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        answers = events(response)
    assert answers[-1]["type"] == "response.incomplete"
    for each in answers:
        jsonschema.validate(each, told | schema)


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


def test_an_empty_id_is_none(cell: Cell) -> None:
    with cell.stream(ROUTE, {"Last-Event-ID": ""}, **ASKED) as response:
        assert response.status_code == 200
        assert events(response)[0]["type"] == "response.created"


def test_there_is_nothing_to_fetch_or_delete(cell: Cell) -> None:
    for method, path in (("GET", "/a"), ("DELETE", "/a"), ("POST", "/a/cancel"), ("GET", "/a/b")):
        response = httpx.request(method, cell.url + ROUTE + path)
        assert response.status_code == 404
        assert "Responses are not stored" in error_of(response)["message"]
    for method in ("GET", "DELETE"):
        response = httpx.request(method, cell.url + ROUTE)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert "does not take" in error_of(response)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_before_the_first_event_is_a_status(cell: Cell, stream: bool) -> None:
    cell.scheduler.reject = Reason.OVERLOADED
    response = cell.post(ROUTE, **ASKED, stream=stream)
    cell.scheduler.reject = None
    assert (response.status_code, error_of(response)["code"]) == (503, "overloaded")


def test_draining_fails_what_does_not_end(cell: Cell) -> None:
    """The last of this file: it ends the gateway."""
    cell.scheduler.step_seconds = 0.02
    with cell.stream(ROUTE, input="hello", max_output_tokens=1000, ignore_eos=True) as response:
        wait_until(lambda: bool(cell.scheduler.running))
        cell.process.terminate()
        *_, error, failed = events(response)
    assert (error["type"], error["code"]) == ("error", "overloaded")
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["status"] == "failed"
