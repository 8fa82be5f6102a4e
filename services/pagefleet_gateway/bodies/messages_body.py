"""What clients may send to `POST /v1/messages`: Anthropic's Messages API, as far as it is of text.

Beside its fields are those of vLLM that all routes share (`schema.CommonBody`). Nothing is to be
said of the cache here, as equal prefixes are shared anyhow: `cache_control` may stand wherever that
API has it, and changes nothing.
"""

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pagefleet_gateway.bodies.schema import (
    CommonBody,
    Effort,
    Length,
    StopList,
    TextPart,
    ThinkingOptions,
)
from pagefleet_gateway.bodies.structured import OutputFormat
from pagefleet_gateway.bodies.tools import MAX_TOOLS, ToolName
from pagefleet_gateway.sandbox.grammars import Schema

INVALID_JSON: Final = "INVALID_JSON"
"""The only member of a call's input, where its arguments are no object: their text."""


class PlainText(msgspec.Struct):
    """A text, where nothing else may be."""

    type: Literal["text"]
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought."""

    thinking: str
    signature: str | None = None
    """Nobody checks it."""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Thoughts of another server, which nobody can read here: they are left out."""

    data: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """What came of a call."""

    tool_use_id: str
    content: str | list[PlainText] | None = None
    is_error: bool | None = None


Block: TypeAlias = TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


Role: TypeAlias = Literal["user", "assistant", "system"]


class Turn(msgspec.Struct):
    """An entry of `messages`."""

    role: Role
    content: str | list[Block]


class ClientTool(msgspec.Struct):
    """An entry of `tools`."""

    name: ToolName
    input_schema: Schema
    """JSON schema of the object that its input is."""
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    """As in a chat (`tools.FunctionSpec`)."""


class Choosing(msgspec.Struct):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Of the tool that must be called."""
    disable_parallel_tool_use: bool | None = None


class OutputOptions(msgspec.Struct):
    """`output_config`."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct):
    """`metadata`: of no consequence here."""

    user_id: str | None = None


class CountBody(CommonBody, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    instructions: str | list[PlainText] | None = msgspec.field(default=None, name="system")
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choosing | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    """Not obeyed: all that was said stays, as far as there is room."""
    thread: dict[str, Any] | None = None
    """Of a server that keeps what was said."""


class MessagesBody(CountBody, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Length
    """The answer is shorter where there is less room."""
    stop_sequences: StopList | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
