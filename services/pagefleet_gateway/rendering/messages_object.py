"""The JSON of answers of `/v1/messages`, whole and as the events of a stream, as types.

What is constant is what never happens here, but must be there by the published schema. An event's
`type` is also its name.
"""

from typing import Any, Literal, TypeAlias

import msgspec

from pagefleet_gateway.error_form import MessagesError


class AnswerText(msgspec.Struct, tag_field="type", tag="text"):
    """What the model says."""

    text: str
    citations: list[dict[str, Any]] = []
    """Always empty; by the published schema it may be null, which not all clients take."""


class AnswerThoughts(msgspec.Struct, tag_field="type", tag="thinking"):
    """What it thinks before."""

    thinking: str
    signature: str = ""
    """Some clients keep only signed thoughts: the text's SHA-256."""


class Caller(msgspec.Struct, tag_field="type", tag="direct", frozen=True):
    """The model itself."""


class MadeCall(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool that it wants to be called."""

    id: str
    name: str
    input: dict[str, Any]
    caller: Caller = Caller()


ContentBlock: TypeAlias = AnswerText | AnswerThoughts | MadeCall


class ThinkingDetails(msgspec.Struct):
    """More about the tokens of the answer."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens that a request took. Those of its prompt are the sum of the first three."""

    input_tokens: int
    """That were computed for it."""
    cache_creation_input_tokens: Literal[0] = 0
    """What is kept costs nothing and is not counted."""
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails
    cache_creation: None = None
    inference_geo: None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"


class Message(msgspec.Struct, kw_only=True):
    """The answer, whole, or before anything is said."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None = None
    """`end_turn`, `max_tokens`, `stop_sequence`, `tool_use`, `model_context_window_exceeded`;
    `timeout` and `abort` are ours."""
    stop_sequence: str | None = None
    """The one that ended it."""
    stop_details: None = None
    container: None = None
    usage: MessageUsage


class MessageTokens(msgspec.Struct):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: Message


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """A block begins, with nothing in it."""

    index: int
    content_block: ContentBlock


class TextPiece(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingPiece(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More of what the model thinks."""

    thinking: str


class SignaturePiece(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of what it thought."""

    signature: str


class InputPiece(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of a call's input, as the model writes it."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """It is whole."""

    index: int


class Ending(msgspec.Struct):
    """Why the answer ended."""

    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The answer has ended; its usage is that of the whole request."""

    delta: Ending
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    """Nothing happens yet."""


class Failure(msgspec.Struct, tag_field="type", tag="error"):
    """The last event, where there is no answer."""

    error: MessagesError


BlockEvent: TypeAlias = BlockStart | BlockDelta | BlockStop
MessageEvent: TypeAlias = MessageStart | BlockEvent | MessageDelta | MessageStop | Ping | Failure
