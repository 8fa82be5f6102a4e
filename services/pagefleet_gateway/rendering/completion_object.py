"""The JSON of answers of `/v1/completions` and of chats, as types: whole, and in chunks."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.bodies.tools import FunctionCall, ToolCall, call_id
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

    @classmethod
    def of(cls, piece: Piece, before: str, generation: str, choice: int) -> "ChatAnswer":
        """The whole of a choice of the answer `generation`, whose text goes on with `before`."""
        calls: list[ToolCall] = []
        for delta in piece.calls:
            if delta.name is not None:
                id = call_id(generation, choice, delta.index)
                calls.append(ToolCall(id, FunctionCall(delta.name, "")))
            calls[-1].function.arguments += delta.arguments
        content = before + piece.text
        return cls(
            content or (None if calls else ""),
            reasoning_content=piece.reasoning or UNSET,
            reasoning=piece.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )


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

    @classmethod
    def of(cls, piece: Piece, generation: str, choice: int) -> "Delta":
        """What a piece adds to a choice of the answer `generation`."""
        calls = [
            ToolCallDelta(call.index, FunctionDelta(call.arguments))
            if call.name is None
            else ToolCallDelta(
                call.index,
                FunctionDelta(call.arguments, call.name),
                call_id(generation, choice, call.index),
                "function",
            )
            for call in piece.calls
        ]
        return cls(
            content=piece.text or UNSET,
            reasoning_content=piece.reasoning or UNSET,
            reasoning=piece.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )


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
