"""One streamed completion, read and timed.

`EventStream` turns the bytes of an HTTP response into the payloads of its server-sent events (h11
does the framing), `Transcript` makes of them what was measured; neither does I/O. `complete` moves
the bytes, over a connection of its own for each request.

An answer counts only if it is whole: status 200, every event valid JSON without an error, usage
that states exactly the tokens asked for, `[DONE]` at the end. All else is a `StreamError`.
"""

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

import h11
import msgspec
from benchmarks.loadgen.workload import Request

_READ_SIZE = 1 << 16


class StreamError(Exception):
    """An answer is not whole; `kind` groups such answers, the text tells about this one."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go: `path` is put before `/v1/completions`."""

    host: str
    port: int
    path: str

    @classmethod
    def at(cls, url: str) -> "Server":
        """The server at an `http://` URL.

        Raises:
            ValueError: it is none.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server; write for example http://host:8000")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/"))


class EventStream:
    """Bytes of an HTTP/1.1 response in, payloads of its server-sent events out."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._status = 0
        self._unfinished = b""
        self.ended = False

    def request(self, server: Server, body: bytes) -> bytes:
        """The bytes of the request that this answers."""
        headers = {
            "Host": f"{server.host}:{server.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Accept": "text/event-stream",
            "Connection": "close",
        }
        head = h11.Request(
            method="POST", target=f"{server.path}/v1/completions", headers=list(headers.items())
        )
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        return b"".join(self._http.send(event) or b"" for event in events)

    def feed(self, received: bytes) -> list[bytes]:
        """Take what was received (nothing: the server closed) and give the new payloads.

        Raises:
            StreamError: the response is cut off, is no HTTP, or has another status than 200.
        """
        payloads: list[bytes] = []
        try:
            self._http.receive_data(received)
            while not self.ended:
                event = self._http.next_event()
                if isinstance(event, h11.Data):
                    payloads += self._lines(event.data)
                elif isinstance(event, h11.Response):
                    self._status = event.status_code
                elif isinstance(event, h11.EndOfMessage):
                    self._end()
                else:
                    break
        except h11.RemoteProtocolError as error:
            raise StreamError("cut off", str(error)) from error
        return payloads

    def _lines(self, data: bytes) -> list[bytes]:
        if self._status != 200:
            self._unfinished += data
            return []
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def _end(self) -> None:
        self.ended = True
        if self._status != 200:
            text = self._unfinished.decode(errors="replace")
            raise StreamError(f"HTTP {self._status}", text)


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, slots=True)
class Completed:
    """A whole answer. Times are `perf_counter` seconds; `chunks` are when each piece arrived."""

    due: float
    chunks: list[float]
    done: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Transcript:
    """The events of one answer so far."""

    chunks: list[float] = field(default_factory=list)
    usage: _Usage | None = None
    done: float | None = None

    def add(self, payload: bytes, now: float) -> None:
        """Note an event's payload that arrived at `now`.

        Raises:
            StreamError: it is malformed, or the server's word that it failed.
        """
        if payload == b"[DONE]":
            self.done = now
            return
        try:
            chunk = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            text = payload.decode(errors="replace")
            raise StreamError("malformed event", f"{error}: {text}") from error
        if chunk.error is not None:
            raise StreamError("error event", payload.decode(errors="replace"))
        # Some servers end with a chunk that carries only the finish reason: no token came with it.
        if any(c.text or not c.finish_reason or not self.chunks for c in chunk.choices):
            self.chunks.append(now)
        self.usage = chunk.usage or self.usage

    def completed(self, due: float, tokens: int) -> Completed:
        """The answer to a request that was due at `due` and asked for `tokens` tokens.

        Raises:
            StreamError: something is missing, or there are not exactly `tokens` tokens.
        """
        if self.done is None:
            raise StreamError("no [DONE]", f"the stream ended after {len(self.chunks)} chunks")
        if self.usage is None:
            raise StreamError("no usage", "no event of the stream states the usage")
        given = self.usage.completion_tokens
        if given != tokens or not self.chunks:
            text = f"asked for {tokens} tokens, got {given} in {len(self.chunks)} chunks"
            raise StreamError("wrong token count", text)
        details = self.usage.prompt_tokens_details
        cached = (details and details.cached_tokens) or 0
        return Completed(due, self.chunks, self.done, self.usage.prompt_tokens, cached, given)


async def complete(server: Server, request: Request, due: float) -> Completed:
    """Send a request that was due at `due` and read its answer to the end.

    Raises:
        StreamError: the answer is not whole.
        OSError: the connection was refused or reset.
    """
    events, transcript = EventStream(), Transcript()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        writer.write(events.request(server, request.body))
        while transcript.done is None and not events.ended:
            received = await reader.read(_READ_SIZE)
            now = perf_counter()
            for payload in events.feed(received):
                transcript.add(payload, now)
    finally:
        writer.close()
    return transcript.completed(due, request.output_tokens)
