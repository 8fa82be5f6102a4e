"""A body of `/v1/responses` as the chat that it means.

Messages, calls, their outputs and thoughts are items of one list. A chat has turns: what the model
thought, said and called before it was answered is one message of the assistant.
"""

from typing import Final

from pagefleet_gateway.bodies.parsing import Parsed, parse
from pagefleet_gateway.bodies.response_body import (
    LOGPROBS,
    AllowedTools,
    Choosing,
    ChosenFunction,
    FunctionTool,
    InputItem,
    ResponseBody,
    Role,
)
from pagefleet_gateway.bodies.schema import ChatBody, ChatMessage, CommonBody, joined, shared
from pagefleet_gateway.bodies.tools import (
    FunctionCall,
    FunctionName,
    FunctionSpec,
    NamedTool,
    SubsetChoice,
    Tool,
    ToolCall,
    ToolChoice,
    ToolSubset,
)
from pagefleet_gateway.errors import bad_request
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.conversation import (
    Conversation,
    prompt_of,
    understand_conversation,
)
from pagefleet_gateway.requests.decisions import check_shared
from pagefleet_gateway.requests.generation import Generation, Limits

_NO_STATE: Final = "nothing is stored here. Send the earlier items of the conversation in input."
_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""What fields of a chat are called here."""

_REQUIRED: Final = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""Fields of an item, by its type."""


def understand_response(content: bytes, model: ServedModel, limits: Limits) -> Generation:
    """Decide what a body of `/v1/responses` asks for."""
    parsed = parse(content, ResponseBody)
    body, model = parsed.body, model.named(parsed.body.model)
    check_shared(body, limits)
    if body.top_logprobs and not _shows_logprobs(body):
        raise bad_request(f"top_logprobs needs include to have {LOGPROBS!r}.", "top_logprobs")
    return understand_conversation(_conversation(parsed), model, limits)


def response_prompt(
    content: bytes, model: ServedModel, max_model_len: int
) -> tuple[list[int], list[str]]:
    """The ids of the prompt that a response would have, and the fields that are ignored.

    Raises:
        ApiError: 400 that names the field, or 404 for another model.
    """
    parsed = parse(content, ResponseBody)
    return prompt_of(_conversation(parsed), model.named(parsed.body.model), max_model_len)


def _conversation(parsed: Parsed[ResponseBody]) -> Conversation:
    body = parsed.body
    _refuse_state(body)
    return Conversation(
        kind="response",
        body=_chat(body),
        form=body.text.format if body.text else None,
        max_tokens=body.max_output_tokens,
        ignored=[*parsed.ignored, *_ignored(body)],
        names=_NAMES,
        drops_oldest=body.truncation == "auto",
        asked=body,
    )


def _refuse_state(body: ResponseBody) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name} is not supported: {_NO_STATE}", name, "unsupported")
    if body.background:
        text = "background is not supported: nothing is stored here from which it could be fetched."
        raise bad_request(text, "background", "unsupported")


def _ignored(body: ResponseBody) -> list[str]:
    summary = body.reasoning.summary if body.reasoning else None
    return [] if summary is None else ["reasoning.summary"]


def _shows_logprobs(body: ResponseBody) -> bool:
    return LOGPROBS in (body.include or ())


def _chat(body: ResponseBody) -> ChatBody:
    return ChatBody(
        **shared(body, CommonBody),
        messages=_messages(body),
        stop=body.stop,
        logprobs=_shows_logprobs(body),
        top_logprobs=body.top_logprobs,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        verbosity=body.text.verbosity if body.text else None,
        tools=[_tool(tool) for tool in body.tools or []],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
    )


def _choice(choice: Choosing | None) -> ToolChoice | None:
    match choice:
        case AllowedTools(mode=mode, tools=tools):
            named = [NamedTool(FunctionName(tool.name)) for tool in tools]
            return SubsetChoice(ToolSubset(mode, named))
        case ChosenFunction(name=name):
            return NamedTool(FunctionName(name))
    return choice


def _tool(tool: FunctionTool) -> Tool:
    spec = FunctionSpec(tool.name, tool.description, tool.parameters, tool.strict)
    return Tool("function", spec)


def _messages(body: ResponseBody) -> list[ChatMessage]:
    turns = _Turns()
    if body.instructions is not None:
        turns.messages.append(ChatMessage("system", body.instructions))
    if isinstance(body.input, str):
        turns.messages.append(ChatMessage("user", body.input))
    else:
        for number, item in enumerate(body.input):
            turns.add(item, f"input[{number}]")
    return turns.messages


class _Turns:
    """The messages of a chat, to which items are added."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._open: ChatMessage | None = None
        """The turn of the assistant, the last of the messages, while it may go on."""

    def add(self, item: InputItem, field: str) -> None:
        kind = item.type or "message"
        for name in _REQUIRED[kind]:
            if getattr(item, name) is None:
                raise bad_request(f"{field}.{name} is missing.", field)
        match kind:
            case "message":
                self._say(item.role or "user", joined(item.content))
            case "function_call":
                function = FunctionCall(item.name or "", item.arguments or "")
                turn = self._turn()
                turn.tool_calls = turn.tool_calls or []
                turn.tool_calls.append(ToolCall(item.call_id or "", function))
            case "function_call_output":
                self._other(ChatMessage("tool", joined(item.output), tool_call_id=item.call_id))
            case "reasoning" if thoughts := joined(item.content or item.summary):
                turn = self._turn(begins=self._open is not None and bool(self._open.content))
                turn.reasoning_content = (turn.reasoning_content or "") + thoughts

    def _say(self, role: Role, text: str) -> None:
        if role != "assistant":
            self._other(ChatMessage(role, text))
            return
        turn = self._open
        has_spoken = turn is not None and bool(turn.content) and not turn.tool_calls
        turn = self._turn(begins=has_spoken)
        turn.content = turn.text + text

    def _other(self, message: ChatMessage) -> None:
        self.messages.append(message)
        self._open = None

    def _turn(self, begins: bool = False) -> ChatMessage:
        if self._open is None or begins:
            self._open = ChatMessage("assistant", "")
            self.messages.append(self._open)
        return self._open
