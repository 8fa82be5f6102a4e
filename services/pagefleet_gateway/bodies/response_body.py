"""What clients may send to `POST /v1/responses`: OpenAI's Responses API, as far as it has no state.

Nothing is stored here, so a request brings along all that was said: `input` is a text, or the
items of a conversation, among them those that earlier answers consisted of. Beside OpenAI's fields
are those of vLLM that all routes share (`schema.CommonBody`).
"""

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pagefleet_gateway.bodies.schema import (
    Alternatives,
    CommonBody,
    Count,
    Effort,
    RefusalPart,
    StopList,
    StopString,
    Verbosity,
)
from pagefleet_gateway.bodies.structured import TextFormat
from pagefleet_gateway.bodies.tools import MAX_TOOLS, ToolName
from pagefleet_gateway.sandbox.grammars import Schema

LOGPROBS: Final = "message.output_text.logprobs"
"""What `include` asks for by this name is in the answer."""

Includable: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Of all others but the first there is nothing here: thoughts are in clear."""

Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
Label: TypeAlias = Annotated[str, Meta(max_length=1024)]
"""Is given back as it came."""


class InputText(msgspec.Struct, tag_field="type", tag="input_text"):
    """A part of what is said to the model."""

    text: str


class SaidText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A part of what the model said."""

    text: str


class ThoughtText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A part of what it thought."""

    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A part of a summary of what it thought."""

    text: str


Part: TypeAlias = InputText | SaidText | RefusalPart | ThoughtText | SummaryText


Role: TypeAlias = Literal["user", "assistant", "system", "developer"]


class InputItem(msgspec.Struct):
    """An item of the conversation; which fields it must have depends on its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    """None is a message."""
    role: Role | None = None
    """Of a message."""
    content: str | list[Part] | None = None
    """Of a message, or of thoughts."""
    call_id: str | None = None
    """Of a call, and of its output."""
    name: str | None = None
    """Of the function that is called."""
    arguments: str | None = None
    """Of a call: JSON as the model wrote it."""
    output: str | list[Part] | None = None
    """Of a call."""
    summary: list[Part] | None = None
    """Of thoughts."""


class FunctionTool(msgspec.Struct):
    """An entry of `tools`."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Schema | None = None
    """JSON schema of the object that its arguments are."""
    strict: bool | None = None
    """As in a chat (`tools.FunctionSpec`)."""


class ChosenFunction(msgspec.Struct, tag_field="type", tag="function"):
    """A `tool_choice` of one function."""

    name: str


class AllowedTool(msgspec.Struct):
    """One of those that may be called."""

    type: Literal["function"]
    name: str


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """A `tool_choice` among some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


Choosing: TypeAlias = Literal["none", "auto", "required"] | ChosenFunction | AllowedTools


class TextOptions(msgspec.Struct, omit_defaults=True):
    """`text`: what the answer must read like."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None
    """Not obeyed."""


class ReasoningOptions(msgspec.Struct):
    """`reasoning`: whether the model is to think, where its template can tell it so."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Not obeyed: thoughts are shown as they are."""


class EventOptions(msgspec.Struct):
    """`stream_options`."""

    include_obfuscation: bool | None = None
    """Padding against eavesdroppers; not made."""


class ResponseBody(CommonBody, kw_only=True):
    """`POST /v1/responses`."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choosing | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Count | None = None
    stop: StopString | StopList | None = None
    top_logprobs: Alternatives | None = None
    include: list[Includable] | None = None
    stream_options: EventOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    background: bool | None = None
    store: bool | None = None
    """Whatever it says, nothing is stored."""
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    metadata: Metadata | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
