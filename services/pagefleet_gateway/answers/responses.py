"""The JSON of answers, as types: both routes, whole and in chunks of a stream."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from pagefleet_gateway.bodies.tools import ToolCall
from pagefleet_gateway.text.logprobs import ChatLogprobs, CompletionLogprobs, PromptForm


class PromptTokensDetails(msgspec.Struct):
    """More about the tokens of the prompts."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """More about the tokens of the answers, as far as there is anything to tell."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    """Of the prediction that the client sent, tokens that appeared in the answers (`foretold`)."""
    rejected_prediction_tokens: int | UnsetType = UNSET
    """And those that did not; they are no tokens of the answers."""


class Usage(msgspec.Struct):
    """Tokens that a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A choice of `/v1/completions`, whole or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptForm | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    """See `Answer.fingerprint`; in a stream, where a choice ends, and in the end."""


class ChatAnswer(msgspec.Struct):
    """What the assistant said."""

    content: str | None
    """None where it only calls tools."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same: what DeepSeek called it, vLLM calls so now, and clients know one or the other."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """A choice of `/v1/chat/completions`."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptForm | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    """What is new of a function's call: its name once, and more of its arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """What is new of a call; the first piece has its id."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What is new in a choice of a chat stream."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A piece of a choice of a chat stream."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptForm | UnsetType = UNSET


class Live(msgspec.Struct):
    """The answer of `/live`."""

    status: Literal["ok"]


class Health(Live):
    """The answer of `/health` and `/ready`."""

    workers: int
    running: int
    waiting: int


class Version(msgspec.Struct):
    """The answer of `/version`."""

    version: str


class Model(msgspec.Struct, kw_only=True):
    """An entry of `/v1/models`, as OpenAI's clients read it, and Anthropic's.

    root: what it was made from. parent: of a LoRA adapter, the model's name.
    """

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    """The same, as RFC 3339 writes it."""
    owned_by: Literal["pagefleet"] = "pagefleet"
    root: str
    parent: str | None = None
    max_model_len: int
    max_input_tokens: int
    max_tokens: int
    """Of an answer; these two are the same as `max_model_len`."""
    capabilities: None = None


class ModelList(msgspec.Struct):
    """The answer of `/v1/models`."""

    data: list[Model]
    object: Literal["list"] = "list"
    has_more: Literal[False] = False
    first_id: str = ""
    last_id: str = ""
