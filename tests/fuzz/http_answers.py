"""Answers as a strict client reads them: framing, status, form of errors, form of streams."""

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h11

from tests.fuzz.http_bytes import Conversation

LAST = b"GET /live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
"""Follows whole requests, so that the end of their answers is seen."""

_REFUSALS = frozenset({400, 403, 404, 405, 408, 410, 413, 415, 429, 431})
_HONEST = frozenset({503, 504})
_HONEST_CODES = frozenset({"overloaded", "no_worker", "draining", "deadline_exceeded"})
_PATIENCE = 60.0
_SILENCE = 0.05


@dataclass
class HttpAnswer:
    """One answer."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes = b""


@dataclass
class Exchange:
    """A conversation on its connection."""

    said: Conversation
    sock: socket.socket
    received: bytearray = field(default_factory=bytearray)

    @classmethod
    def begin(cls, said: Conversation, address: tuple[str, int]) -> "Exchange":
        """Say all of it."""
        sock = socket.create_connection(address, timeout=_PATIENCE)
        sock.sendall(b"".join(said.requests) + (said.rest or LAST))
        return cls(said, sock)

    def finish(self) -> None:
        """Take the answers in, or leave."""
        with self.sock:
            if self.said.reads:
                self._receive()

    def _receive(self) -> None:
        """To the end of the connection; where it ends in nonsense, silence may be the end."""
        self.sock.settimeout(_SILENCE if self.said.rest else _PATIENCE)
        try:
            while part := self.sock.recv(1 << 16):
                self.received += part
        except ConnectionResetError:
            assert self.said.rest, "the server reset a connection whose requests were whole"
        except TimeoutError:
            assert self.said.rest, f"no answer in {_PATIENCE:g} s to {self.said}"

    def judge(self) -> list[int]:
        """The statuses of what came; every answer is one that the API knows."""
        answers = list(self._answers())
        if self.said.reads and not self.said.rest:
            assert len(answers) == len(self.said.requests) + 1
            assert answers[-1].status == 200
        for number, answer in enumerate(answers):
            try:
                _judge(answer)
            except AssertionError as error:
                asked = [*self.said.requests, self.said.rest or LAST][number]
                raise AssertionError(f"{error} was the answer to {asked!r}") from error
        return [answer.status for answer in answers]

    def _answers(self) -> Iterator[HttpAnswer]:
        """Those that are whole, in their order."""
        data, asked = bytes(self.received), 0
        while data:
            method = b"GET"
            if asked < len(self.said.requests):
                method = self.said.requests[asked].partition(b" ")[0]
            connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 24)
            connection.send(h11.Request(method=method, target="/", headers=[("Host", "a")]))
            connection.receive_data(data)
            answer = _answer(connection)
            if answer is None:
                assert self.said.rest, f"an answer is cut off: {data[:2000]!r}"
                return
            yield answer
            data, asked = bytes(connection.trailing_data[0]), asked + 1


def _answer(connection: h11.Connection) -> HttpAnswer | None:
    answer = None
    while True:
        event = connection.next_event()
        match event:
            case h11.Response():
                answer = HttpAnswer(event.status_code, dict(event.headers))
            case h11.Data():
                assert answer is not None
                answer.body += event.data
            case h11.EndOfMessage():
                return answer
            case h11.InformationalResponse():
                assert event.status_code == 100
            case _:
                return None


def _judge(answer: HttpAnswer) -> None:
    told = f"{answer.status} {answer.body[:2000]!r}"
    if answer.status != 200:
        assert answer.status in _REFUSALS | _HONEST, told
        assert (b"retry-after" in answer.headers) >= (answer.status in _HONEST), told
        if answer.body:
            _judge_refusal(json.loads(answer.body))
        return
    kind = answer.headers.get(b"content-type", b"")
    if kind.startswith(b"application/json") and answer.body:
        json.loads(answer.body, parse_constant=_no_number)
    elif kind.startswith(b"text/event-stream"):
        _judge_stream(answer.body)


def _judge_refusal(body: dict[str, Any]) -> None:
    if "type" not in body:
        assert body.keys() == {"error"}
        _judge_error(body["error"])
        return
    assert body.keys() == {"type", "error", "request_id"}, body
    _judge_messages_error(body["error"])


def _judge_messages_error(error: dict[str, Any]) -> None:
    assert {"message", "type"} <= error.keys() <= {"message", "type", "details"}, error
    assert error["type"] != "api_error", error


def _judge_error(error: dict[str, object]) -> None:
    assert error.keys() == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error["type"] != "server_error", error


def _judge_stream(body: bytes) -> None:
    """Events of one chunk each, and the end that clients wait for; or events with names."""
    lines = body.decode().split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    if names:
        _judge_named(names, data)
        return
    assert data[-1] == "[DONE]"
    for payload in data[:-1]:
        chunk = json.loads(payload, parse_constant=_no_number)
        if error := chunk.get("error"):
            _judge_error(error)
            assert error["type"] == "invalid_request_error" or error["code"] in _HONEST_CODES


def _judge_named(names: list[str], data: list[str]) -> None:
    """Events of a response, or of a message."""
    events = [json.loads(payload, parse_constant=_no_number) for payload in data]
    assert [event["type"] for event in events] == names
    if names[0].startswith("response."):
        _judge_response(names, events)
    else:
        _judge_message(names, events)


def _judge_message(names: list[str], events: list[dict[str, Any]]) -> None:
    """Blocks follow each other, and the last event is the end, or why there is none."""
    names = [name for name in names if name != "ping"]
    told = [event for event in events if event["type"] != "ping"]
    if names[-1] == "error":
        _judge_messages_error(told[-1]["error"])
        assert told[-1]["error"]["details"]["error_code"] in _HONEST_CODES, told[-1]
        return
    assert (names[0], *names[-2:]) == ("message_start", "message_delta", "message_stop"), names
    begun = 0
    for name, event in zip(names[1:-2], told[1:-2], strict=True):
        assert name.startswith("content_block_")
        begun += name == "content_block_start"
        assert event["index"] == begun - 1
    assert begun == names.count("content_block_stop")


def _judge_response(names: list[str], events: list[dict[str, Any]]) -> None:
    """Counted, and the last is one of its ends."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert names[-1].removeprefix("response.") in ("completed", "incomplete", "failed")
    for event in events:
        assert event["type"] != "error" or event["code"] in _HONEST_CODES, event


def _no_number(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")
