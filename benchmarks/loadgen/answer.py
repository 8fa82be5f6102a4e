"""What a recorded answer says, and whether it is whole.

A streamed answer counts only if it is whole: status 200, every server-sent event valid JSON without
an error, a usage that states the tokens asked for (or fewer, where the model may end its answer),
`[DONE]` at the end. All else is `Failed`.
h11 does the HTTP framing.
"""

from dataclasses import dataclass, field

import h11
import msgspec

from benchmarks.loadgen.recording import Recording
from benchmarks.loadgen.workload import Request


@dataclass(frozen=True, slots=True)
class Completed:
    """A whole answer. Times are `perf_counter` seconds; `chunks` are when each piece arrived."""

    due: float
    chunks: list[float]
    done: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A request without a whole answer; `kind` groups such requests."""

    due: float
    done: float
    kind: str
    message: str


Outcome = Completed | Failed


class AnswerError(Exception):
    """An answer is not whole; `kind` groups such answers, the text tells about this one."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def understand(recording: Recording) -> Outcome:
    """What became of a request."""
    if recording.failure is not None:
        return Failed(recording.due, recording.ended, *recording.failure)
    events, transcript = EventStream(recording.connection), Transcript()
    try:
        for now, received in zip(recording.times, recording.reads, strict=True):
            for payload in events.feed(received):
                transcript.add(payload, now)
        events.feed(b"")
        return transcript.completed(recording.due, recording.request)
    except AnswerError as error:
        return Failed(recording.due, recording.ended, error.kind, str(error))


def whole_body(connection: h11.Connection, received: bytes) -> bytes:
    """The body of all that came of an HTTP/1.1 response until the server closed.

    Raises:
        AnswerError: the response is cut off, is no HTTP, or has another status than 200.
    """
    status, body = 0, b""
    connection.receive_data(received)
    connection.receive_data(b"")
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
    except h11.RemoteProtocolError as error:
        raise AnswerError("cut off", str(error)) from error
    if status != 200:
        raise AnswerError(f"HTTP {status}", body.decode(errors="replace"))
    return body


class EventStream:
    """Bytes of an HTTP/1.1 response in, payloads of its server-sent events out.

    `connection` has sent the request. OpenAI's servers put one JSON object on one `data:` line. An
    event counts when it is whole, with the empty line behind it.
    """

    def __init__(self, connection: h11.Connection) -> None:
        self._http = connection
        self.last_id = ""
        """Of the last event that was given out; empty if none had an id."""
        self._status = 0
        self._unfinished = b""
        self._id = ""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Take what was received (nothing: the server closed) and give the new payloads.

        Raises:
            AnswerError: the response is cut off, is no HTTP, or has another status than 200.
        """
        payloads: list[bytes] = []
        try:
            self._http.receive_data(received)
            while True:
                event = self._http.next_event()
                if isinstance(event, h11.Data):
                    payloads += self._lines(event.data)
                elif isinstance(event, h11.Response):
                    self._status = event.status_code
                elif isinstance(event, h11.EndOfMessage):
                    self._check_status()
                    return payloads
                else:
                    return payloads
        except h11.RemoteProtocolError as error:
            raise AnswerError("cut off", str(error)) from error

    def _lines(self, data: bytes) -> list[bytes]:
        if self._status != 200:
            self._unfinished += data
            return []
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        payloads: list[bytes] = []
        for line in lines:
            name, _, value = line.strip().partition(b":")
            if name == b"id":
                self._id = value.strip().decode()
            elif name == b"data":
                self._data.append(value.strip())
            elif not line.strip():
                payloads += self._data
                self._data, self.last_id = [], self._id
        return payloads

    def _check_status(self) -> None:
        if self._status != 200:
            text = self._unfinished.decode(errors="replace")
            raise AnswerError(f"HTTP {self._status}", text)


class _Delta(msgspec.Struct, frozen=True):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    """Of a completion, which has `text`, or of a chat, which has a `delta`."""

    text: str = ""
    delta: _Delta = _Delta()
    finish_reason: str | None = None

    def delivers(self, first: bool) -> bool:
        """Whether a token came with it; it is the `first` if none came before.

        A chat may begin with a chunk that only says whose turn it is, and some servers end with one
        that carries only the finish reason.
        """
        if self.text or self.delta.content:
            return True
        return self.delta.role is None and (first or not self.finish_reason)


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


@dataclass(slots=True)
class Transcript:
    """The events of one answer so far."""

    chunks: list[float] = field(default_factory=list)
    usage: _Usage | None = None
    done: float | None = None

    def add(self, payload: bytes, now: float) -> None:
        """Note an event's payload that arrived at `now`.

        Raises:
            AnswerError: it is malformed, or the server's word that it failed.
        """
        if payload == b"[DONE]":
            self.done = now
            return
        try:
            chunk = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            text = payload.decode(errors="replace")
            raise AnswerError("malformed event", f"{error}: {text}") from error
        if chunk.error is not None:
            raise AnswerError("error event", payload.decode(errors="replace"))
        if any(choice.delivers(first=not self.chunks) for choice in chunk.choices):
            self.chunks.append(now)
        self.usage = chunk.usage or self.usage

    def completed(self, due: float, request: Request) -> Completed:
        """The answer to a request that was due at `due`.

        Raises:
            AnswerError: something is missing, or the tokens are not as many as were asked for.
        """
        if self.done is None:
            raise AnswerError("no [DONE]", f"the stream ended after {len(self.chunks)} chunks")
        if self.usage is None:
            raise AnswerError("no usage", "no event of the stream states the usage")
        given, asked = self.usage.completion_tokens, request.output_tokens
        least = asked if request.exact else 1
        if not least <= given <= asked or not self.chunks:
            text = f"asked for {asked} tokens, got {given} in {len(self.chunks)} chunks"
            raise AnswerError("wrong token count", text)
        details = self.usage.prompt_tokens_details
        cached = (details and details.cached_tokens) or 0
        return Completed(due, self.chunks, self.done, self.usage.prompt_tokens, cached, given)
