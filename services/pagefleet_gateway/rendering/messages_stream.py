"""Answers of `/v1/messages`: one JSON body, or the events of Anthropic's streams.

The first event tells of usage what is known by then, which may be nothing of the cache; the last
but one tells all of it. While nothing happens there are pings, which are not counted.
"""

from collections.abc import Iterator

import msgspec

from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.bodies.messages_body import MessagesBody
from pagefleet_gateway.error_form import messages_error
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.rendering.event_renderer import EventRenderer
from pagefleet_gateway.rendering.messages_blocks import ContentBlocks
from pagefleet_gateway.rendering.messages_object import (
    BlockEvent,
    Ending,
    Failure,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    ThinkingDetails,
)

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageRenderer(EventRenderer):
    """Writes one message."""

    keep_alive = b"event: ping\ndata: %s\n\n" % msgspec.json.encode(Ping())
    last = (MessageStop,)

    def __init__(self, answer: Answer, model: ServedModel, ticket: str = "") -> None:
        super().__init__(answer, model, ticket)
        self._blocks = ContentBlocks(answer.generation.id)
        self._reason: str | None = None
        self._stop: str | None = None

    @property
    def _whole(self) -> Message:
        return Message(
            id=self._answer.generation.id,
            model=self._answer.generation.model,
            content=self._blocks.blocks,
            stop_reason=self._reason,
            stop_sequence=self._stop,
            usage=self._usage(),
        )

    def _begin(self) -> Iterator[MessageStart]:
        message = self._whole
        message.usage = self._usage(begins=True)
        yield MessageStart(message)

    def _follow(self, piece: Piece) -> Iterator[BlockEvent | MessageDelta | MessageStop]:
        yield from self._blocks.take(piece)
        if piece.finish is not None:
            self._end(piece.finish, piece.stop_reason)
            yield MessageDelta(Ending(self._reason, self._stop), self._usage())
            yield MessageStop()

    def _fail(self, error: ApiError) -> Iterator[Failure]:
        yield Failure(messages_error(error))

    def _end(self, finish: str, stop: str | int | None) -> None:
        self._reason = _REASONS.get(finish, finish)
        if finish == "stop" and isinstance(stop, str):
            self._reason, self._stop = "stop_sequence", stop
        elif finish == "length" and self._lacked_room:
            self._reason = "model_context_window_exceeded"

    @property
    def _lacked_room(self) -> bool:
        """Fewer tokens than were asked for are all; a strict server knows no such end."""
        generation = self._answer.generation
        assert isinstance(generation.asked, MessagesBody)
        fewer = self._answer.choices[0].count < generation.asked.max_tokens
        return fewer and not generation.strict

    def _usage(self, begins: bool = False) -> MessageUsage:
        """So far, or of a stream that begins, whatever came by then."""
        usage = self._answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        thought = ThinkingDetails(0 if begins else self._answer.thought_tokens)
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=0 if begins else usage.completion_tokens,
            output_tokens_details=thought,
        )
