"""What a client may put on a connection, as strategies: good requests, bad ones, and noise."""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.json_values import DOCUMENT, bodies, mutated

OPERATIONS: list[tuple[str, str, dict[str, Any]]] = [
    (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]
_POSTS = [each for each in OPERATIONS if each[0] == "POST"]

_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "X")
_TARGETS = (
    *("/", "//", "/v1", "/v1/models/", "/v1/models/a/b?c=d", "/v1/models/%2e%2e", "/..;/health"),
    *("/%00", "/%ff%fe", "/v1//completions", "/V1/COMPLETIONS", "/health?x=%", "*", "/status/"),
    *("http://elsewhere/health", "/" + "a" * 3000, "/metrics?" + "&".join(["a=b"] * 300)),
)
_HEADERS = (
    *((b"Authorization", b"Bearer x"), (b"Authorization", b"Basic \xff"), (b"Accept", b"*/*")),
    *((b"X-Api-Key", b"\xff"), (b"anthropic-version", b"2023-06-01"), (b"X-Api-Key", b"")),
    *((b"X-Request-Id", b"mine"), (b"X-Request-Id", b"\xc3\xa9" * 99), (b"X-Request-Id", b"")),
    *((b"Last-Event-ID", b"0"), (b"Last-Event-ID", b"v1.AAAA.BBBB"), (b"Last-Event-ID", b"\xff")),
    *((b"Content-Encoding", b"gzip"), (b"Content-Type", b"text/xml; charset=utf-7")),
    *((b"Expect", b"100-continue"), (b"Upgrade", b"websocket"), (b"Upgrade", b"h2c")),
    *((b"Cookie", b"a=" + b"b" * 4000), (b"Origin", b"null"), (b"Range", b"bytes=0-1")),
    (b"traceparent", b"00-" + b"f" * 32 + b"-" + b"0" * 16 + b"-01"),
)
_BROKEN_HEADERS = (
    *(b"No colon\r\n", b": no name\r\n", b"A b: c\r\n", b" folded: d\r\n", b"A:\x00\r\n"),
    *(b"Content-Length: -1\r\n", b"Content-Length: 1, 2\r\n", b"Content-Length: 9e9\r\n"),
    *(b"Content-Length: 99999999999999999999\r\n", b"Content-Length: 5\r\nContent-Length: 6\r\n"),
    *(b"Transfer-Encoding: gzip\r\n", b"Transfer-Encoding: chunked, chunked\r\n", b"A: b\r"),
    *(b"Host: second\r\n", b"\xff\xfe: a\r\n", b"A: " + b"b" * 70_000 + b"\r\n", b"a: b\n" * 3000),
)
_NOISE = (
    *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    *(b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /\r\n\r\n", b"get / http/1.1\r\n\r\n", b"\0"),
    *(b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\n"),
)


@dataclass(frozen=True)
class Conversation:
    """What one client says on one connection."""

    requests: tuple[bytes, ...]
    """Each whole and well framed: it gets exactly one answer."""
    rest: bytes
    """What follows them and is not."""
    reads: bool
    """The client waits for the answers."""

    @property
    def count(self) -> int:
        """Requests, with the broken one at the end."""
        return len(self.requests) + bool(self.rest)


def _head(method: str, target: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    line = f"{method} {target} HTTP/1.1\r\n".encode()
    return line + b"".join(b"%s: %s\r\n" % header for header in [(b"Host", b"a"), *headers])


def _chunks(draw: st.DrawFn, body: bytes) -> bytes:
    """A body in chunks, with an extension or a trailer now and then."""
    framed = b""
    while body:
        size = draw(st.integers(1, len(body)))
        extension = draw(st.sampled_from([b"", b"", b';a="b"']))
        framed += b"%x%s\r\n%s\r\n" % (size, extension, body[:size])
        body = body[size:]
    return framed + b"0\r\n" + draw(st.sampled_from([b"", b"", b"Trailer: x\r\n"])) + b"\r\n"


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request that is HTTP, whatever it asks for."""
    method, target, operation = draw(st.sampled_from(_POSTS * 3 + OPERATIONS))
    body = b""
    if method == "POST":
        content = operation["requestBody"]["content"]["application/json"]
        body = draw(bodies(content["schema"]))
    if draw(st.integers(0, 9)) == 0:
        target = draw(st.sampled_from(_TARGETS))
    if draw(st.integers(0, 19)) == 0:
        method = draw(st.sampled_from(_METHODS))
    headers = draw(st.lists(st.sampled_from(_HEADERS), max_size=2))
    if body and draw(st.integers(0, 4)) == 0:
        head = _head(method, target, [*headers, (b"Transfer-Encoding", b"chunked")])
        return head + b"\r\n" + _chunks(draw, body)
    if body:
        headers.append((b"Content-Length", b"%d" % len(body)))
    return _head(method, target, headers) + b"\r\n" + body


@st.composite
def _broken(draw: st.DrawFn) -> bytes:
    """What is no request, or no end of one."""
    whole = draw(requests())
    head, _, body = whole.partition(b"\r\n\r\n")
    match draw(st.integers(0, 5)):
        case 0:
            return whole[: draw(st.integers(1, len(whole) - 1))]
        case 1:
            return mutated(draw, whole)
        case 2:
            return head + b"\r\n" + draw(st.sampled_from(_BROKEN_HEADERS)) + b"\r\n" + body
        case 3:
            length = max(0, len(body) + draw(st.integers(-20, 20)))
            return head + b"\r\nContent-Length: %d\r\n\r\n" % length + body
        case 4:
            sizes = [b"-1", b"g", b"ffffffffffffffffffff", b"2 ", b"0x2", b"", b"3"]
            size = draw(st.sampled_from(sizes))
            return head + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\n{}\r\n0\r\n\r\n"
    return draw(st.sampled_from(_NOISE) | st.binary(min_size=1, max_size=300))


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """Some requests, pipelined, of which the last may be broken."""
    whole = draw(st.lists(requests(), min_size=1, max_size=6))
    rest = draw(_broken()) if draw(st.integers(0, 2)) == 0 else b""
    return Conversation(tuple(whole), rest, draw(st.integers(0, 9)) > 0)
