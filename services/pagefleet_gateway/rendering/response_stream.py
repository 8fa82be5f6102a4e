"""Answers of `/v1/responses`: one JSON body, or events, each with its number from 0.

The last is a whole, incomplete or failed response.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.bodies.response_body import ReasoningOptions, ResponseBody, TextOptions
from pagefleet_gateway.bodies.structured import TextFormat
from pagefleet_gateway.errors import ApiError
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.rendering.answer import Answer
from pagefleet_gateway.rendering.event_renderer import EventRenderer
from pagefleet_gateway.rendering.response_events import (
    Completed,
    Created,
    Error,
    Event,
    Failed,
    Incomplete,
    InProgress,
)
from pagefleet_gateway.rendering.response_items import COMPLETE, OutputItems
from pagefleet_gateway.rendering.response_object import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from pagefleet_gateway.requests.generation import Generation

_REASONS = {"length": "max_output_tokens"}


class ResponseRenderer(EventRenderer):
    """Writes one response."""

    last = (Completed, Incomplete)

    def __init__(self, answer: Answer, model: ServedModel, ticket: str = "") -> None:
        super().__init__(answer, model, ticket)
        self._items = OutputItems(answer.generation.id, model.vocabulary)
        self._response = _begun(answer.generation)
        self._response.output = self._items.items

    @property
    def _whole(self) -> ResponseObject:
        return self._response

    def _begin(self) -> Iterator[Event]:
        yield Created(response=self._response)
        yield InProgress(response=self._response)

    def _follow(self, piece: Piece) -> Iterator[Event]:
        yield from self._items.take(piece)
        if piece.finish is not None:
            yield self._end(piece.finish)

    def _fail(self, error: ApiError) -> Iterator[Event]:
        self._response.status = "failed"
        code: Literal["server_error", "invalid_prompt"]
        code = "invalid_prompt" if error.status == 400 else "server_error"
        self._response.error = ResponseError(code, error.message)
        yield Error(code=error.code, message=error.message, param=error.param)
        yield Failed(response=self._response)

    def _number(self, event: msgspec.Struct, number: int) -> None:
        assert isinstance(event, Event)
        event.sequence_number = number

    def _end(self, finish: str) -> Event:
        self._response.usage = _usage(self._answer)
        if finish in COMPLETE:
            self._response.status = "completed"
            return Completed(response=self._response)
        self._response.status = "incomplete"
        self._response.incomplete_details = IncompleteDetails(_REASONS.get(finish, finish))
        return Incomplete(response=self._response)


def _begun(generation: Generation) -> ResponseObject:
    """The response before anything is said."""
    body, params = generation.asked, generation.params
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
