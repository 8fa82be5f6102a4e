"""The events of a stream of `/v1/responses`, as types; `type` is also the event's name."""

from typing import TypeAlias

import msgspec

from pagefleet_gateway.rendering.response_object import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseObject,
)
from pagefleet_gateway.text.logprobs import ChatToken


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    """What all have in common."""

    sequence_number: int = 0
    """From 0; set when it is sent."""


class Created(Event, kw_only=True, tag="response.created"):
    """The first."""

    response: ResponseObject


class InProgress(Event, kw_only=True, tag="response.in_progress"):
    """The answer is being made."""

    response: ResponseObject


class Completed(Event, kw_only=True, tag="response.completed"):
    """The last, where the answer is whole."""

    response: ResponseObject


class Incomplete(Event, kw_only=True, tag="response.incomplete"):
    """The last, where it ended before its time."""

    response: ResponseObject


class Failed(Event, kw_only=True, tag="response.failed"):
    """The last, where it is no answer."""

    response: ResponseObject


class Error(Event, kw_only=True, tag="error"):
    """Why it is none."""

    code: str | None
    message: str
    param: str | None


class ItemEvent(Event, kw_only=True):
    """Of an item of the output."""

    output_index: int


class ItemAdded(ItemEvent, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    item: OutputItem


class ItemDone(ItemEvent, kw_only=True, tag="response.output_item.done"):
    """It is whole."""

    item: OutputItem


class ArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    item_id: str
    delta: str


class ArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """All of them."""

    item_id: str
    name: str
    arguments: str


class PartEvent(ItemEvent, kw_only=True):
    """Of a part of an item's content."""

    item_id: str
    content_index: int = 0


class PartAdded(PartEvent, kw_only=True, tag="response.content_part.added"):
    """A part begins."""

    part: OutputText | ReasoningText


class PartDone(PartEvent, kw_only=True, tag="response.content_part.done"):
    """It is whole."""

    part: OutputText | ReasoningText


class TextDelta(PartEvent, kw_only=True, tag="response.output_text.delta"):
    """More of a message's text."""

    delta: str
    logprobs: list[ChatToken]


class TextDone(PartEvent, kw_only=True, tag="response.output_text.done"):
    """All of it."""

    text: str
    logprobs: list[ChatToken]


class ReasoningDelta(PartEvent, kw_only=True, tag="response.reasoning_text.delta"):
    """More of what the model thinks."""

    delta: str


class ReasoningDone(PartEvent, kw_only=True, tag="response.reasoning_text.done"):
    """All of it."""

    text: str


ResponseEvent: TypeAlias = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | Error
    | ItemAdded
    | ItemDone
    | ArgumentsDelta
    | ArgumentsDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
)
