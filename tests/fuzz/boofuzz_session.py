"""HTTP as boofuzz breaks it: `python -m tests.fuzz.boofuzz_session HOST PORT` of a gateway.

Needs boofuzz, which `make test-clients` installs in an environment of its own. Each request is a
sequence of named elements, and each case is a request with one of them replaced, in turn by all
that boofuzz knows to have hurt servers (`String`, `Delim`) and that might hurt this one (`Group`).
So the cases are the same in every run, where those of `test_http` are drawn. Every case has a
connection of its own, and the requests are fuzzed side by side. The first wrong answer ends it.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pool

from boofuzz import (
    Block,
    Delim,
    Fuzzable,
    Group,
    ITargetConnection,
    Request,
    Session,
    Size,
    Static,
    String,
    Target,
)

from tests.fuzz.http_answers import Exchange
from tests.fuzz.http_bytes import Conversation
from tests.fuzz.json_values import DOCUMENT, HARDLY_JSON, PLAUSIBLE

_LONGEST = 70_000
"""Characters of a replaced text: just more than what the gateway reads."""
_SIMPLE = (True, False, -1, 0, 1, 2, 0.5, 2**31, 2**63, "", "a", [], [None], {})
_VALUES = sorted(
    {json.dumps(value) for values in (_SIMPLE, *PLAUSIBLE.values()) for value in values}
    | {*HARDLY_JSON}
)
"""Texts for a field of a body."""


def _elements(*parts: str | Fuzzable) -> list[Fuzzable]:
    """The parts; a text is one that never changes."""
    return [
        Static(f"part {number}", part) if isinstance(part, str) else part
        for number, part in enumerate(parts)
    ]


def _text(name: str, value: str) -> String:
    return String(name, value, max_len=_LONGEST)


def _optional(name: str, besides: str | None = None) -> Iterator[str | Fuzzable]:
    """The fields that a body may have besides those it must have, each null until its turn; those
    of another body, `besides`, are left to that.
    """
    schemas = DOCUMENT["components"]["schemas"]
    elsewhere = schemas[besides]["properties"] if besides else {}
    for field in sorted(schemas[name]["properties"].keys() - schemas[name]["required"]):
        if field in elsewhere:
            continue
        yield f', "{field}": '
        yield Group(field, _VALUES, default_value="null", encoding="utf-8")


def _post(name: str, path: str, *body: str | Fuzzable) -> Request:
    """A request that stays well framed whatever its body is."""
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: a\r\nContent-Length: "
    length = Size("length", "body", output_format="ascii", fuzzable=False)
    block = Block("body", children=_elements(*body))
    return Request(name, children=_elements(head, length, "\r\n\r\n", block))


WHOLE = (
    _post(
        "completion",
        "completions",
        *('{"prompt": "', _text("text", "Once"), '"', *_optional("CompletionBody"), "}"),
    ),
    _post(
        "chat",
        "chat/completions",
        *('{"messages": [{"role": "', _text("role", "user"), '", "content": "'),
        *(_text("text", "Hello"), '"}]', *_optional("ChatBody"), "}"),
    ),
    _post(
        "response",
        "responses",
        '{"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}, ',
        '{"type": "function_call", "call_id": "a", "name": "f", "arguments": "',
        *(_text("arguments", "{}"), f'"}}], "stop_token_ids": {[*range(128)]}'),
        *(*_optional("ResponseBody", besides="ChatBody"), "}"),
    ),
    _post(
        "message",
        "messages",
        *('{"messages": [{"role": "user", "content": [{"type": "', _text("type", "text")),
        *('", "text": "', _text("text", "Hello"), '"}]}, {"role": "', _text("role", "assistant")),
        '", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": "',
        *(_text("input", "b"), '"}}]}, {"role": "user", "content": [{"type": "tool_result", '),
        f'"tool_use_id": "a"}}]}}], "max_tokens": 8, "stop_token_ids": {[*range(128)]}',
        *(*_optional("MessagesBody", besides="ChatBody"), "}"),
    ),
    _post(
        "guided",
        "completions",
        *('{"prompt": "a", "structured_outputs": {"regex": "', _text("regex", "[a-z]+"), '"}'),
        *(', "stop": ["', _text("stop", "b"), '"], "cache_salt": "', _text("salt", "c"), '"}'),
    ),
)
"""Requests of which every case gets exactly one answer."""
FRAMING = (
    Request(
        "head",
        children=_elements(
            *(_text("method", "POST"), Delim("space", " "), _text("target", "/tokenize")),
            *(" ", _text("version", "HTTP/1.1"), Delim("line end", "\r\n")),
            "Host: a\r\nConnection: close\r\n",
            *(_text("name", "X-Request-Id"), Delim("colon", ": "), _text("value", "mine")),
            *("\r\nContent-Length: ", _text("length", "15"), Delim("head end", "\r\n\r\n")),
            '{"prompt": "a"}',
        ),
    ),
    Request(
        "chunks",
        children=_elements(
            "POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: ",
            *(_text("coding", "chunked"), "\r\n\r\n", _text("size", "8"), Delim("mark", ";")),
            *(_text("extension", "a=b"), '\r\n{"prompt', Delim("chunk end", "\r\n")),
            *('7\r\n": "a"}\r\n', _text("last size", "0"), "\r\n"),
            *(_text("trailer", "A: b"), Delim("end", "\r\n\r\n")),
        ),
    ),
)
"""Requests of which some cases are none, or have no end."""


class Connection(ITargetConnection):
    """What boofuzz speaks through; each case is judged as soon as it is said."""

    def __init__(self, address: tuple[str, int], *, whole: bool) -> None:
        self.statuses: Counter[int] = Counter()
        self._address, self._whole = address, whole

    def open(self) -> None:
        """Nothing: a case has a connection of its own."""

    def send(self, data: bytes) -> int:
        """Say a case and take in the answers.

        Raises:
            AssertionError: one of them is not as the API has it, or is missing.
        """
        said = Conversation((data,), b"", True) if self._whole else Conversation((), data, True)
        try:
            exchange = Exchange.begin(said, self._address)
        except (BrokenPipeError, ConnectionResetError):
            assert not self._whole, f"the connection broke while this was sent: {data!r}"
        else:
            exchange.finish()
            self.statuses.update(exchange.judge()[: len(said.requests) or None])
        return len(data)

    def recv(self, max_bytes: int) -> bytes:
        """Nothing: `send` took all."""
        return b""

    def close(self) -> None:
        """Nothing, as the connection is closed."""

    @property
    def info(self) -> str:
        """Where it leads."""
        return "{}:{}".format(*self._address)


def fuzz(name: str, address: tuple[str, int]) -> str:
    """All cases of a request; returns how many they were, and the answers by their statuses."""
    (request,) = (each for each in (*WHOLE, *FRAMING) if each.name == name)
    connection = Connection(address, whole=request in WHOLE)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(
            target=Target(connection),
            web_port=None,
            fuzz_loggers=[],
            fuzz_db_keep_only_n_pass_cases=1,
            db_filename=f"{folder}/cases.db",
        )
        session.connect(request)
        session.fuzz(max_depth=1)
    assert connection.statuses[200], f"no case of {name} was served: {connection.statuses}"
    return f"{name}: {session.num_cases_actually_fuzzed} cases, {dict(connection.statuses)}"


if __name__ == "__main__":
    at = partial(fuzz, address=(sys.argv[1], int(sys.argv[2])))
    names = [request.name for request in (*WHOLE, *FRAMING)]
    with Pool(len(names)) as pool:
        for said in pool.imap_unordered(at, names):
            print(said, flush=True)
