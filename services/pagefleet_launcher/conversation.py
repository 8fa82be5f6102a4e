"""A conversation over HTTP whose answers survive the connections over which they come.

If a connection breaks, the answer goes on where it was: the same request is sent again, with the id
of the last event as `Last-Event-ID`, to whichever gateway answers there now.
"""

import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPResponse

import msgspec

from pagefleet_launcher.asking import BROKEN, Detail, Refused, Unanswered, ask

TRIES = 20
"""How often in a row an answer is asked for again while nothing new comes."""

PAUSE = 0.5
"""Seconds before each of these tries."""

TIMEOUT = 60.0
"""Seconds without a byte after which a connection counts as broken; streams that wait send some."""

UNAVAILABLE = "service_unavailable_error"
"""The type of errors that pass: requests cannot be served just now, or the gateway is ending."""


class Message(msgspec.Struct):
    """What one side of the conversation said."""

    role: str
    content: str


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Detail | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class ChatError(Exception):
    """There is no answer, or only a part of it; says why."""


class _PassingError(Exception):
    """The answer should be asked for again."""


@dataclass
class Chat:
    """A conversation with `model` at `url`; `options` are further fields of each request."""

    url: str
    model: str
    options: dict[str, object] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def ask(self, question: str) -> Generator[str, None, None]:
        """The pieces of the answer as they come; those that came are remembered.

        Raises:
            ChatError: the question is refused, or the rest of the answer does not come.
        """
        asked, answer = Message("user", question), Message("assistant", "")
        try:
            for piece in self._pieces([*self.messages, asked]):
                answer.content += piece
                yield piece
        finally:
            if answer.content:
                self.messages += [asked, answer]

    def _pieces(self, messages: list[Message]) -> Iterator[str]:
        body = {"model": self.model, "messages": messages, "stream": True, **self.options}
        stream, tries = _Stream(self.url, msgspec.json.encode(body)), 0
        while True:
            try:
                for piece in stream.pieces():
                    tries = 0
                    yield piece
                return
            except _PassingError as error:
                tries += 1
                if tries > TRIES:
                    raise ChatError(f"the answer broke off: {error}") from error
            time.sleep(PAUSE)


@dataclass
class _Stream:
    """The answer to one request, over as many connections as it needs."""

    url: str
    content: bytes
    last_id: str = ""
    """Of the last event that came."""

    def pieces(self) -> Iterator[str]:
        """The texts of the events that follow, to the end of the answer."""
        with _asked(self.url, "/v1/chat/completions", self.content, self.last_id) as response:
            try:
                for id, payload in _events(response):
                    if payload == b"[DONE]":
                        return
                    self.last_id = id or self.last_id
                    yield _text(payload)
            except BROKEN as error:
                raise _PassingError(str(error) or "the connection broke") from error
        raise _PassingError("the connection was closed")


def _events(lines: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Id and data of each complete event (WHATWG HTML, server-sent events)."""
    fields: dict[bytes, bytes] = {}
    for line in map(bytes.rstrip, lines):
        if line:
            name, _, value = line.partition(b": ")
            fields[name] = value
        elif b"data" in fields:
            yield fields.get(b"id", b"").decode(), fields[b"data"]
            fields = {}


def _text(payload: bytes) -> str:
    event = msgspec.json.decode(payload, type=_Event)
    if event.error is not None:
        raise _error(event.error)
    return "".join(choice.delta.content or "" for choice in event.choices)


def _asked(url: str, path: str, content: bytes | None = None, last_id: str = "") -> HTTPResponse:
    headers = {"Content-Type": "application/json"} | ({"Last-Event-ID": last_id} if last_id else {})
    try:
        return ask(url, path, content, headers, TIMEOUT)
    except Unanswered as error:
        raise _PassingError(str(error)) from error
    except Refused as error:
        raise _error(error.detail) from error


def _error(detail: Detail) -> Exception:
    passes = detail.type == UNAVAILABLE
    return _PassingError(detail.message) if passes else ChatError(detail.message)


def first_model(url: str) -> str:
    """The name of the model that is served at `url`.

    Raises:
        ChatError: it cannot be found out.
    """
    try:
        with _asked(url, "/v1/models") as response:
            return msgspec.json.decode(response.read(), type=_Models).data[0].id
    except _PassingError as error:
        raise ChatError(str(error)) from error
    except (ValueError, IndexError, *BROKEN) as error:
        raise ChatError(f"{url} does not tell what it serves: {error}") from error
