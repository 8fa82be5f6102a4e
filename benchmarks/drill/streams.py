"""One request over HTTP, and what came of it: token for token, beside what had to come."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic

import h11
import msgspec

from benchmarks.drill.questions import Question
from benchmarks.loadgen.answer import AnswerError, EventStream, whole_body
from benchmarks.loadgen.recording import Server

EXACT = "exact"
LOST = "lost"
REPEATED = "repeated"
WRONG = "wrong"
REFUSED = "refused"
"""An error of status 4xx or 5xx before anything was sent: honest, though no answer."""

_READ_SIZE = 1 << 16


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int] = []


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: object = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Answer:
    """What has come of a request so far. Times are of the monotonic clock, in seconds."""

    question: Question
    asked: float = field(default_factory=monotonic)
    choices: dict[int, list[int]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    """When each piece came."""
    error: str | None = None
    """What ended it before its time."""
    whole: bool = False
    last_id: str = ""
    """Of the last event that is in it."""

    @property
    def tokens(self) -> int:
        """Received of the choice that has got least."""
        received = [self.choices.get(index, ()) for index in range(self.question.choices)]
        return min(map(len, received))

    def add(self, payload: bytes) -> None:
        """Take in the payload of an event, or the body of an answer that is not streamed."""
        if payload == b"[DONE]":
            self.whole = True
            return
        self.times.append(monotonic())
        chunk = _decoder.decode(payload)
        if chunk.error is not None:
            self.error = str(chunk.error)
        for choice in chunk.choices:
            self.choices.setdefault(choice.index, []).extend(choice.token_ids)

    @property
    def verdict(self) -> str:
        """How it compares with the answer that had to come."""
        complete = self.whole and self.error is None
        for index, expected in enumerate(self.question.expected):
            got = self.choices.get(index, [])
            if got != expected[: len(got)]:
                return REPEATED if _repeats(got, expected) else WRONG
            complete = complete and got == expected
        if complete:
            return EXACT
        refused = self.error is not None and self.error.startswith("HTTP ") and not self.choices
        return REFUSED if refused else LOST

    @property
    def longest_gap(self) -> float:
        """Seconds between two pieces, or before the first."""
        moments = [self.asked, *self.times]
        return max((b - a for a, b in pairwise(moments)), default=0.0)


def _repeats(got: list[int], expected: list[int]) -> bool:
    """Whether the first wrong tokens are a few that had come before."""
    pairs = zip(got, expected, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(expected))
    window = got[at : at + 4]
    return any(expected[start : start + len(window)] == window for start in range(at))


async def ask(
    server: Server,
    question: Question,
    watch: Callable[[Answer], None] = lambda answer: None,
    patience: float = 120.0,
    begun: Answer | None = None,
) -> Answer:
    """Send a question and take its answer in; `watch` sees it after every piece.

    It does not raise: what goes wrong is the answer's `error`. What has `begun` goes on behind the
    last event that it has.
    """
    answer = begun or Answer(question)
    answer.error = None
    try:
        async with asyncio.timeout(patience):
            await _exchange(server, answer, watch)
    except TimeoutError:
        answer.error = f"no whole answer within {patience:g} s"
    except (OSError, AnswerError) as error:
        kind = error.kind if isinstance(error, AnswerError) else "connection"
        answer.error = f"{kind}: {error}"
    return answer


async def _exchange(server: Server, answer: Answer, watch: Callable[[Answer], None]) -> None:
    connection = h11.Connection(h11.CLIENT)
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        writer.write(server.message(connection, answer.question.body, answer.last_id))
        if answer.question.stream:
            await _take_events(EventStream(connection), reader, answer, watch)
        else:
            answer.add(whole_body(connection, await reader.read(-1)))
            answer.whole = True
            watch(answer)
    finally:
        writer.close()


async def _take_events(
    events: EventStream,
    reader: asyncio.StreamReader,
    answer: Answer,
    watch: Callable[[Answer], None],
) -> None:
    while received := await reader.read(_READ_SIZE):
        for payload in events.feed(received):
            answer.add(payload)
            watch(answer)
        answer.last_id = events.last_id or answer.last_id
    events.feed(b"")
