"""Answers of `/v1/responses` as bytes: one JSON body, or typed events.

Each event has its name, and a number that counts them from 0. Because events follow from the tokens
alone, a client that resumes its stream, here or at another gateway, gets them under the same
numbers: all are made again, and those that it has are left out. The id of an event says how many.
There is no `[DONE]`: the last event is a whole, incomplete or failed response.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from pagefleet.wire import Finish
from pagefleet_gateway.answer import Answer
from pagefleet_gateway.choice import Piece
from pagefleet_gateway.errors import ApiError, too_late
from pagefleet_gateway.generation import Generation
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.one_line import one_line
from pagefleet_gateway.response_body import ReasoningOptions, ResponseBody, TextOptions
from pagefleet_gateway.response_events import (
    Completed,
    Created,
    Error,
    Event,
    Failed,
    Incomplete,
    InProgress,
)
from pagefleet_gateway.response_items import COMPLETE, OutputItems
from pagefleet_gateway.response_object import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from pagefleet_gateway.resume import Had, changed, event_id, position
from pagefleet_gateway.structured import TextFormat

_encoder = msgspec.json.Encoder()

_REASONS = {"length": "max_output_tokens"}


class ResponseRenderer:
    """Writes one answer; see `stream.Renderer`."""

    def __init__(self, answer: Answer, model: ServedModel, ticket: str = "") -> None:
        self._answer = answer
        self._ticket = ticket
        self._items = OutputItems(answer.generation.id, model.vocabulary)
        self._response = _begun(answer.generation)
        self._response.output = self._items.items
        self._made = 0
        """Events, those that the client has among them."""
        self._digest = 0
        """Of the tokens that all of them follow from."""
        self._had = answer.generation.had.get(0, Had(0))

    def start(self) -> bytes:
        """Events before the first news."""
        return self._written(Created(response=self._response)) + self._written(
            InProgress(response=self._response)
        )

    def events(self, pieces: Mapping[int, Piece]) -> bytes:
        """All that follows from what became certain."""
        return b"".join(self._written(event) for event in self._events(pieces))

    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that fails after its headers.

        Its events have no ids: whoever resumes the stream does so behind the last before them.
        """
        self._made, self._ticket = max(self._made, self._had.count), ""
        self._response.status = "failed"
        code: Literal["server_error", "invalid_prompt"]
        code = "invalid_prompt" if error.status == 400 else "server_error"
        self._response.error = ResponseError(code, error.message)
        return self._written(
            Error(code=error.code, message=error.message, param=error.param)
        ) + self._written(Failed(response=self._response))

    def whole(self, pieces: Mapping[int, Piece]) -> bytes:
        """The finished answer, given all pieces joined."""
        for _ in self._events(pieces):
            pass
        return _encoder.encode(self._response)

    def _events(self, pieces: Mapping[int, Piece]) -> Iterator[Event]:
        for piece in pieces.values():
            for part in piece.parts or [piece]:
                self._digest = part.digest
                yield from self._items.take(part)
                if part.finish is not None:
                    yield self._end(part.finish)

    def _end(self, finish: str) -> Event:
        if self._made < self._had.count:
            raise too_late() if finish == Finish.TIMEOUT else changed()
        self._response.usage = _usage(self._answer)
        if finish in COMPLETE:
            self._response.status = "completed"
            return Completed(response=self._response)
        self._response.status = "incomplete"
        self._response.incomplete_details = IncompleteDetails(_REASONS.get(finish, finish))
        return Incomplete(response=self._response)

    def _written(self, event: Event) -> bytes:
        event.sequence_number = self._made
        self._made += 1
        if self._made == self._had.count and self._digest != self._had.digest:
            raise changed()
        if self._made <= self._had.count:
            return b""
        head = f"event: {event.__struct_config__.tag}\n"
        if self._ticket:
            ends = isinstance(event, Completed | Incomplete)
            numerics = self._answer.choices[0].numerics
            had = Had(self._made, self._digest, ends, numerics)
            head += f"id: {event_id(self._ticket, [position(had)])}\n"
        return b"%sdata: %s\n\n" % (head.encode(), one_line(_encoder.encode(event)))


def _begun(generation: Generation) -> ResponseObject:
    """The response before anything is said."""
    body, params = generation.response, generation.params
    assert isinstance(body, ResponseBody)
    return ResponseObject(
        id=generation.id,
        created_at=generation.created,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=generation.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=_given(body.prompt_cache_key),
        reasoning=body.reasoning or ReasoningOptions(),
        safety_identifier=_given(body.safety_identifier),
        temperature=params.temperature,
        text=_text(body.text or TextOptions()),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=_given(body.user),
    )


def _text(asked: TextOptions) -> TextOptions:
    return msgspec.structs.replace(asked, format=asked.format or TextFormat("text"))


def _given(label: str | None) -> str | UnsetType:
    return UNSET if label is None else label


def _usage(answer: Answer) -> ResponseUsage:
    usage = answer.usage
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(answer.thought_tokens),
        usage.total_tokens,
    )
