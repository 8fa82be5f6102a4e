"""Answers that are streamed as named events, which follow from the tokens alone.

Events are made token by token, whatever came together, and counted. So a client that resumes its
stream, here or at another gateway, gets the very same: all are made again, and those that it has
are left out. The id of an event says how many it and those before it are. There is no `[DONE]`: the
last event has a name that says so.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import msgspec

from pagefleet.wire import Finish
from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.errors import ApiError, too_late
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.rendering.one_line import one_line
from pagefleet_gateway.rendering.stream import KEEP_ALIVE
from pagefleet_gateway.resume import Had, changed, event_id, position

_encoder = msgspec.json.Encoder()


class EventRenderer(ABC):
    """Writes one answer; see `stream.Renderer`. A subclass says what its events are.

    An event tells of the answer as it is until the next is asked for.
    """

    keep_alive: ClassVar[bytes] = KEEP_ALIVE
    last: ClassVar[tuple[type[msgspec.Struct], ...]]
    """Events with which an answer has ended."""

    def __init__(self, answer: Answer, model: ServedModel, ticket: str = "") -> None:
        self._answer = answer
        self._ticket = ticket
        self._made = 0
        """Events, those that the client has among them."""
        self._digest = 0
        """Of the tokens that all of them follow from."""
        self._finish: str | None = None
        self._had = answer.generation.had.get(0, Had(0))

    def start(self) -> bytes:
        """Events before the first news."""
        return self._written(self._begin())

    def events(self, pieces: Mapping[int, Piece]) -> bytes:
        """All that follows from what became certain."""
        return self._written(self._told(pieces))

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails after its headers.

        Its events have no ids: whoever resumes the stream does so behind the last before them.
        """
        self._made, self._ticket = max(self._made, self._had.count), ""
        return self._written(self._fail(error))

    def whole(self, pieces: Mapping[int, Piece]) -> bytes:
        """The finished answer, given all pieces joined."""
        for _ in self._told(pieces):
            pass
        return _encoder.encode(self._whole)

    # --- what a subclass says -------------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> Iterator[msgspec.Struct]:
        """Events before the first token."""

    @abstractmethod
    def _follow(self, piece: Piece) -> Iterator[msgspec.Struct]:
        """What follows from one token, or from the end."""

    @abstractmethod
    def _fail(self, error: ApiError) -> Iterator[msgspec.Struct]:
        """What is told of an error that ends the answer."""

    def _number(self, event: msgspec.Struct, number: int) -> None:  # noqa: B027
        """Write into an event which one it is, if it says so."""

    @property
    @abstractmethod
    def _whole(self) -> msgspec.Struct:
        """The answer as it is by now, for one body."""

    # --------------------------------------------------------------------------------------------

    def _told(self, pieces: Mapping[int, Piece]) -> Iterator[msgspec.Struct]:
        for piece in pieces.values():
            for part in piece.parts or [piece]:
                self._digest, self._finish = part.digest, part.finish
                yield from self._follow(part)

    def _written(self, events: Iterable[msgspec.Struct]) -> bytes:
        return b"".join(map(self._write, events))

    def _write(self, event: msgspec.Struct) -> bytes:
        self._number(event, self._made)
        self._made += 1
        ends = isinstance(event, self.last)
        if ends and self._made <= self._had.count:
            raise too_late() if self._finish == Finish.TIMEOUT else changed()
        if self._made == self._had.count and self._digest != self._had.digest:
            raise changed()
        if self._made <= self._had.count:
            return b""
        head = f"event: {event.__struct_config__.tag}\n"
        if self._ticket:
            numerics = self._answer.choices[0].numerics
            had = Had(self._made, self._digest, ends, numerics)
            head += f"id: {event_id(self._ticket, [position(had)])}\n"
        return b"%sdata: %s\n\n" % (head.encode(), one_line(_encoder.encode(event)))
