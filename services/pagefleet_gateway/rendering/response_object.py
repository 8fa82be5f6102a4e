"""The JSON of answers of `/v1/responses`, as types; what is constant is what never happens here."""

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from pagefleet_gateway.bodies.response_body import (
    Choosing,
    FunctionTool,
    ReasoningOptions,
    TextOptions,
)
from pagefleet_gateway.text.logprobs import ChatToken

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    logprobs: list[ChatToken]
    annotations: list[dict[str, Any]] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Thoughts as the model wrote them."""

    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """What the model says."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """What it thinks before."""

    id: str
    status: ItemStatus
    summary: list[dict[str, Any]] = []
    content: list[ReasoningText]
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A function that it wants to be called."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    """JSON as the model wrote it."""


OutputItem: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    """More about the tokens of the prompt."""

    cached_tokens: int
    cache_write_tokens: Literal[0] = 0
    """What is kept costs nothing and is not counted."""


class OutputTokensDetails(msgspec.Struct):
    """More about the tokens of the answer."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens that a request took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why an answer ended before its time."""

    reason: str
    """`max_output_tokens`; `timeout` and `abort` are ours."""


class ResponseError(msgspec.Struct):
    """Why it failed, in the words that the API has for it."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """The answer, whole or so far; the published schema has no null for what may be missing."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | UnsetType = UNSET
    reasoning: ReasoningOptions
    safety_identifier: str | UnsetType = UNSET
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: TextOptions
    tool_choice: Choosing
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"]
    usage: ResponseUsage | UnsetType = UNSET
    user: str | UnsetType = UNSET
