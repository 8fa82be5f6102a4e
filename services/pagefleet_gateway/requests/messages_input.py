"""A body of `/v1/messages` as the chat that it means.

There a turn has blocks: what the assistant thought, said and called, or what came of its calls and
what the user says then. A chat has a message for each result. Turns of one role that follow each
other are one, as Anthropic's API has it, and an answer goes on with the last if that is the
assistant's.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import msgspec

from pagefleet_gateway.bodies.messages_body import (
    INVALID_JSON,
    Block,
    Choosing,
    ClientTool,
    CountBody,
    MessagesBody,
    RedactedThinkingBlock,
    Role,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from pagefleet_gateway.bodies.parsing import parse
from pagefleet_gateway.bodies.schema import (
    ChatBody,
    ChatMessage,
    CommonBody,
    TextPart,
    joined,
    shared,
)
from pagefleet_gateway.bodies.tools import (
    FunctionCall,
    FunctionName,
    FunctionSpec,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
)
from pagefleet_gateway.errors import ApiError, bad_request
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.conversation import (
    Conversation,
    prompt_of,
    understand_conversation,
)
from pagefleet_gateway.requests.decisions import check_shared
from pagefleet_gateway.requests.generation import Generation, Limits

_CHOICES: Final[dict[str, ToolChoice]] = {"auto": "auto", "any": "required", "none": "none"}
_NO_THREADS: Final = "thread_unsupported_request"
"""Tells Anthropic's SDK to go on without a thread."""

_BETWEEN_TURNS: Final = "\n\n"
_ATTRIBUTION: Final = "x-anthropic-billing-header"
"""Begins a text that an agent puts before its instructions for Anthropic's accounts. It is another
with every request, so that no prefix would ever be found in the cache: it is left out."""


def understand_message(content: bytes, model: ServedModel, limits: Limits) -> Generation:
    """Decide what a body of `/v1/messages` asks for."""
    parsed = parse(content, MessagesBody)
    body, model = parsed.body, model.named(parsed.body.model)
    check_shared(body, limits)
    return understand_conversation(_conversation(body, parsed.ignored), model, limits)


def message_prompt(
    content: bytes, model: ServedModel, max_model_len: int
) -> tuple[list[int], list[str]]:
    """The ids of the prompt that a message would have, and the fields that are ignored.

    Raises:
        ApiError: 400 that names the field, or 404 for another model.
    """
    parsed = parse(content, CountBody)
    conversation = _conversation(parsed.body, parsed.ignored)
    return prompt_of(conversation, model.named(parsed.body.model), max_model_len)


def _conversation(body: CountBody, unknown: list[str]) -> Conversation:
    asked = body if isinstance(body, MessagesBody) else None
    unheeded = [] if body.context_management is None else ["context_management"]
    if body.thread is not None:
        text = "thread is not supported: nothing is stored here. Send all that was said."
        raise bad_request(text, "thread", _NO_THREADS)
    chat = _chat(body)
    if asked is not None:
        chat.stop = asked.stop_sequences
    return Conversation(
        kind="message",
        body=chat,
        form=body.output_config.format if body.output_config else None,
        max_tokens=None,
        most=asked.max_tokens if asked else 1,
        ignored=[*unknown, *unheeded],
        names={"reasoning_effort": "output_config.effort"},
        asked=asked,
    )


def _chat(body: CountBody) -> ChatBody:
    messages = _messages(body)
    goes_on = messages[-1].role == "assistant"
    if goes_on and messages[-1].tool_calls:
        last = f"messages[{len(body.messages) - 1}]"
        raise bad_request(f"{last} calls tools: what came of it must follow, as tool_result.", last)
    choice = body.tool_choice
    return ChatBody(
        **shared(body, CommonBody),
        messages=messages,
        continue_final_message=goes_on,
        thinking=body.thinking,
        reasoning_effort=body.output_config.effort if body.output_config else None,
        tools=[_tool(tool) for tool in body.tools or []],
        tool_choice=_choice(choice) if choice else None,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
    )


def _choice(choice: Choosing) -> ToolChoice:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise bad_request("tool_choice.name is missing.", "tool_choice")
    return NamedTool(FunctionName(choice.name))


def _tool(tool: ClientTool) -> Tool:
    spec = FunctionSpec(tool.name, tool.description, tool.input_schema, tool.strict)
    return Tool("function", spec)


def _messages(body: CountBody) -> list[ChatMessage]:
    turns = [(f"messages[{number}]", turn) for number, turn in enumerate(body.messages)]
    if (given := body.instructions) is not None:
        texts = [given] if isinstance(given, str) else [part.text for part in given]
        turns.insert(0, ("system", Turn("system", [TextPart(text) for text in texts])))
    messages: list[ChatMessage] = []
    for role, together in groupby(turns, key=lambda each: each[1].role):
        messages += _said(role, together)
    if not messages:
        raise bad_request("messages says nothing.", "messages")
    return messages


@dataclass
class _Message:
    """A message of a chat while it is gathered."""

    role: Role
    texts: list[list[str]] = field(default_factory=list)
    """Of each turn that is part of it."""
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def gathered(self) -> ChatMessage:
        """All of it."""
        content = _BETWEEN_TURNS.join(filter(None, map("".join, self.texts)))
        thoughts = "".join(self.thoughts) or None
        return ChatMessage(
            self.role, content, tool_calls=self.calls or None, reasoning_content=thoughts
        )


def _said(role: Role, turns: Iterable[tuple[str, Turn]]) -> Iterator[ChatMessage]:
    """The messages of turns that are one: the results of calls, and what else is said."""
    message, answers = _Message(role), False
    for where, turn in turns:
        message.texts.append([])
        blocks = [TextPart(turn.content)] if isinstance(turn.content, str) else turn.content
        for number, block in enumerate(blocks):
            if not isinstance(block, ToolResultBlock):
                _gather(message, block, f"{where}.content[{number}]")
                continue
            if role != "user":
                raise _misplaced(block, role, f"{where}.content[{number}]")
            if any(map(any, message.texts)):
                yield message.gathered()
                message = _Message(role, [[]])
            answers = True
            yield ChatMessage("tool", _result(block), tool_call_id=block.tool_use_id)
    if any(map(any, message.texts)) or not (answers or role == "system"):
        yield message.gathered()


def _gather(message: _Message, block: Block, where: str) -> None:
    match block:
        case TextPart(text=text):
            if not (message.role == "system" and text.startswith(_ATTRIBUTION)):
                message.texts[-1].append(text)
        case ThinkingBlock(thinking=text) if message.role == "assistant":
            message.thoughts.append(text)
        case RedactedThinkingBlock() if message.role == "assistant":
            pass
        case ToolUseBlock() if message.role == "assistant":
            message.calls.append(_call(block))
        case _:
            raise _misplaced(block, message.role, where)


def _call(block: ToolUseBlock) -> ToolCall:
    """A call; where its input was no object, the model sees what it wrote."""
    text = block.input.get(INVALID_JSON)
    if not isinstance(text, str) or len(block.input) > 1:
        text = msgspec.json.encode(block.input).decode()
    return ToolCall(block.id, FunctionCall(block.name, text))


def _result(block: ToolResultBlock) -> str:
    """What a tool says; chat templates know no other way to tell that it failed."""
    text = joined(block.content)
    fails = block.is_error and not text.lower().startswith("error")
    return f"Error: {text}" if fails else text


def _misplaced(block: Block, role: Role, where: str) -> ApiError:
    kind = block.__struct_config__.tag
    return bad_request(f"{where} is a {kind}, which no turn of the {role} has.", where)
