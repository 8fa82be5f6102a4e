"""What clients may send: the bodies of both completion routes, with types and ranges.

The fields are those of the OpenAI API and of vLLM. `null` means absent. How a body is read is
`parsing`, and what happens to fields that are not here `other_fields`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from pagefleet.params import (
    MAX_CHOICES,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROBS,
    MAX_REPETITION_PENALTY,
)
from pagefleet_gateway.bodies.structured import ResponseFormat, StructuredOutputs
from pagefleet_gateway.bodies.tools import MAX_TOOLS, ToolCall, ToolChoice, Tools

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARACTERS: Final = 1024
"""Of each: text that may still become one is held back, and looked through as it grows."""

MAX_LISTED: Final = 1024
"""Entries of the lists of ids and words that shape sampling."""

MAX_SECONDS: Final = 86_400
"""Longest deadline of a request."""

_INT32_MAX = 2**31 - 1

Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
LengthPenalty = Annotated[float, Meta(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)]
Count = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
Length = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_LISTED)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Word = Annotated[str, Meta(min_length=1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopList = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
Truncation = Annotated[int, Meta(ge=-1, le=_INT32_MAX)]
Side: TypeAlias = Literal["left", "right"]
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model is to think, where its template can tell it."""

Verbosity: TypeAlias = Literal["low", "medium", "high"]


Documents: TypeAlias = Annotated[list[dict[str, str]], Meta(max_length=MAX_LISTED)]
"""Texts to answer from, each with such fields as the template reads."""


class StreamOptions(msgspec.Struct):
    """What a stream says about usage."""

    include_usage: bool | None = None
    """One more chunk at the end, with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """The usage so far, in every chunk."""


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of a message's content."""

    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """A piece in which an assistant refused to answer."""

    refusal: str

    @property
    def text(self) -> str:
        """As any other piece's."""
        return self.refusal


ContentPart: TypeAlias = TextPart | RefusalPart


class _HasText(Protocol):
    @property
    def text(self) -> str: ...


def joined(content: str | Sequence[_HasText] | None) -> str:
    """The text of a content, its parts one after another."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class Prediction(msgspec.Struct):
    """Text that the answer may repeat: drafts are taken from it, and it changes no token."""

    type: Literal["content"]
    content: str | list[ContentPart]


class RequestBody(msgspec.Struct, kw_only=True):
    """The fields that all routes share for which a model computes."""

    model: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=_INT32_MAX)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_SECONDS)] | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    user: str | None = None


class CommonBody(RequestBody, kw_only=True):
    """The fields that all routes share whose answers are generated."""

    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LISTED)] | None = None
    bad_words: Annotated[list[Word], Meta(max_length=MAX_LISTED)] | None = None
    allowed_token_ids: TokenIds | None = None
    stream: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    prediction: Prediction | None = None


class ThinkingOptions(msgspec.Struct):
    """`thinking`: whether the model is to think, where its template can tell it so."""

    type: Literal["enabled", "adaptive", "auto", "disabled"]
    budget_tokens: Count | None = None
    """Not obeyed."""
    display: Literal["summarized", "omitted"] | None = None
    """Thoughts are shown as they are, unless they are omitted."""


def shared(body: RequestBody, kind: type[RequestBody]) -> dict[str, Any]:
    """The fields of a body that all of its kind have."""
    return {name: getattr(body, name) for name in kind.__struct_fields__}


class GenerationBody(CommonBody, kw_only=True):
    """The fields that both completion routes share."""

    n: Choices | None = None
    stop: StopString | StopList | None = None
    use_beam_search: bool | None = None
    beam_width: Choices | None = None
    length_penalty: LengthPenalty | None = None
    early_stopping: bool | Literal["never"] | None = None
    max_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Side | None = None
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Logprobs call tokens `token_id:5`: two tokens may have the same text."""
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    echo: bool | None = None
    """Begin the answer with the prompt; in a chat, with the message that the answer continues."""


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    """A text, several, token ids, or several lists of them."""
    best_of: Choices | None = None
    logprobs: Alternatives | None = None


class ChatMessage(msgspec.Struct):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    """None only where an assistant called tools, or refused."""
    refusal: str | None = None
    """What an assistant said in place of a content."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    """Of the call that a tool answers."""
    reasoning_content: str | None = None
    """For templates that show it."""
    reasoning: str | None = None
    """The same, as vLLM calls it now."""

    @property
    def text(self) -> str:
        """The content, its parts joined, or the refusal."""
        return joined(self.content) or self.refusal or ""


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    max_completion_tokens: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    thinking: bool | ThinkingOptions | None = None
    """As DeepSeek, GLM and Kimi have it; counts before `reasoning_effort`."""
    enable_thinking: bool | None = None
    """As Qwen has it; counts before `thinking`."""
    include_reasoning: bool | None = None
    """Whether thoughts are part of the answer; they are by default."""
    verbosity: Verbosity | None = None
    """Not obeyed."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    """For templates that show them."""
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether the model is asked to think, if anything is said of that."""
        thinking, effort = self.thinking, self.reasoning_effort
        if isinstance(thinking, ThinkingOptions):
            thinking = thinking.type != "disabled"
        said = (self.enable_thinking, thinking, None if effort is None else effort != "none")
        return next((each for each in said if each is not None), None)

    @property
    def shows_thoughts(self) -> bool:
        """Whether what the model thinks is part of the answer."""
        omitted = isinstance(self.thinking, ThinkingOptions) and self.thinking.display == "omitted"
        return self.include_reasoning is not False and not omitted
