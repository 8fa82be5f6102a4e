"""A conversation becomes a `Generation`, whatever the route that it came by calls its parts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal
from uuid import uuid4

from pagefleet_gateway.answers.message import MessageForm
from pagefleet_gateway.bodies.bounds import most_tokens
from pagefleet_gateway.bodies.messages_body import MessagesBody
from pagefleet_gateway.bodies.response_body import ResponseBody
from pagefleet_gateway.bodies.schema import ChatBody, ThinkingOptions
from pagefleet_gateway.bodies.structured import Form
from pagefleet_gateway.bodies.tools import ToolUse, tool_use
from pagefleet_gateway.errors import bad_request
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.decisions import answer_id, room_for, structure_for, submits_of
from pagefleet_gateway.requests.generation import Generation, Limits
from pagefleet_gateway.requests.prompts import chat_prompt, continued, newest_turns, truncated
from pagefleet_gateway.requests.sampling import either, sampling_params
from pagefleet_gateway.sandbox.grammars import Structure
from pagefleet_gateway.text.reasoning import FAMILIES, reader

ANSWER_SHARE: Final = 4
"""One part in so many of the context is kept for an answer for which turns may be dropped."""

_LONGEST_TAG: Final = 16
"""Tokens in which a prompt may end with a tag of thoughts, and white space."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What is asked for by a route that answers conversations."""

    kind: Literal["chat", "response", "message"]
    body: ChatBody
    form: Form | None
    max_tokens: int | None
    """None: as many as there is room for, and no more than `most`."""
    ignored: list[str]
    """Fields of the route's body of which nothing comes, but for those that a chat has too."""
    names: Mapping[str, str]
    """What the route calls fields of a chat, where that is something else."""
    most: float = math.inf
    drops_oldest: bool = False
    """What was said first may be left out, where there is no room for all."""
    asked: ResponseBody | MessagesBody | None = None
    """The body of the route, where `body` is what it means."""

    def name(self, field: str) -> str:
        """What the route calls a field of a chat (dotted)."""
        return self.names.get(field, field)


def understand_conversation(
    conversation: Conversation, model: ServedModel, limits: Limits
) -> Generation:
    """Decide what a conversation asks for.

    Raises:
        ApiError: 400 that names the field.
    """
    body, n = conversation.body, conversation.body.n or 1
    asked, field = conversation.max_tokens, conversation.name("max_tokens")
    if asked == 0:
        raise bad_request(f"{field} must be at least 1.", field)
    tools = _tools(conversation, model)
    prompts = [_prompt(conversation, tools, model, limits)]
    prompts = truncated(body, prompts, limits, either(asked, 1))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    most = min(most_tokens(body, n, logprobs), conversation.most)
    max_tokens = room_for(prompts, conversation.name("messages"), asked, field, most, limits)
    structure = structure_for(body, conversation.form, model, tools.structure)
    params = sampling_params(
        body,
        model,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=either(body.prompt_logprobs, -1),
        structure=structure,
    )
    run = uuid4().hex
    return Generation(
        kind=conversation.kind,
        id=answer_id(conversation.kind, body, limits),
        run=run,
        model=model.name,
        body=body,
        prompts=prompts,
        submits=submits_of(run, body, model, prompts, params, n, limits),
        n=n,
        best_of=n,
        logprobs=logprobs,
        echo=[continued(body)] if body.echo else None,
        ignored=_ignored(conversation, model),
        strict=limits.strict,
        created=limits.created,
        shrinks=asked is None,
        asked=conversation.asked,
        message=_message(body, prompts[0], tools, model, structure),
    )


def prompt_of(
    conversation: Conversation, model: ServedModel, max_model_len: int
) -> tuple[list[int], list[str]]:
    """The ids of a conversation's prompt, whether there is room for an answer or not, and the
    fields that are ignored.

    Raises:
        ApiError: 400 that names the field.
    """
    tools = _tools(conversation, model)
    return _prompt(conversation, tools, model, Limits(max_model_len)), _ignored(conversation, model)


def _ignored(conversation: Conversation, model: ServedModel) -> list[str]:
    return [*conversation.ignored, *_unheeded(conversation, model)]


def _unheeded(conversation: Conversation, model: ServedModel) -> list[str]:
    """Options of a chat of which nothing comes, as the route calls them."""
    body, thinking = conversation.body, conversation.body.thinking
    options: dict[str, object] = {"verbosity": body.verbosity}
    if not model.heeds_thinking:
        names = ("reasoning_effort", "thinking", "enable_thinking")
        options |= {name: getattr(body, name) for name in names}
    if isinstance(thinking, ThinkingOptions):
        options["thinking.budget_tokens"] = thinking.budget_tokens
    for name, value in (body.chat_template_kwargs or {}).items():
        options[f"chat_template_kwargs.{name}"] = None if model.template_reads(name) else value
    return [conversation.name(name) for name, value in options.items() if value is not None]


def _prompt(
    conversation: Conversation, tools: ToolUse, model: ServedModel, limits: Limits
) -> list[int]:
    body, field, now = conversation.body, conversation.name("messages"), limits.created
    if not conversation.drops_oldest:
        return chat_prompt(body, model, tools.shown, field, now)
    answer = either(conversation.max_tokens, limits.max_model_len // ANSWER_SHARE)
    return newest_turns(body, model, tools.shown, field, now, limits.room(answer))


def _tools(conversation: Conversation, model: ServedModel) -> ToolUse:
    body = conversation.body
    return tool_use(
        body.tools,
        body.tool_choice,
        body.parallel_tool_calls is not False,
        model.tool_call_parser,
        model.grammars,
        None if conversation.form is None else conversation.form.asked(),
    )


def _message(
    body: ChatBody,
    prompt: list[int],
    tools: ToolUse,
    model: ServedModel,
    structure: Structure | None,
) -> MessageForm | None:
    """How an answer is to be read; one that obeys a grammar from the start holds no thoughts."""
    thoughts, special = None, tools.keeps_special
    if model.reasoning_parser is not None and (structure is None or structure.free):
        goes_on = bool(body.continue_final_message)
        end = model.tokenizer.decode(prompt[-_LONGEST_TAG:], skip_special_tokens=False)
        marks = FAMILIES[model.reasoning_parser]
        thoughts = reader(marks, continued(body) if goes_on else end, goes_on)
        special = special or marks.special
    if thoughts is None and tools.parser is None:
        return None
    return MessageForm(thoughts, tools.parser, tools.parallel, body.shows_thoughts, special)
