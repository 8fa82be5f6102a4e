"""A body becomes a `Generation`: prompts are encoded, parameters completed, lengths compared.

It tokenizes, so it is not for the event loop. Whatever is not acceptable raises an `ApiError`: 400
that names the field, or 404 for a model that is not served.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal
from uuid import uuid4

from pagefleet.params import SamplingParams
from pagefleet.wire import ChoiceState, Submit, pack_ints
from pagefleet_gateway.answers.message import MessageForm
from pagefleet_gateway.bodies.bounds import check_bounds, check_echo, most_tokens, window
from pagefleet_gateway.bodies.messages_body import MessagesBody
from pagefleet_gateway.bodies.parsing import parse
from pagefleet_gateway.bodies.response_body import ResponseBody
from pagefleet_gateway.bodies.schema import (
    ChatBody,
    CommonBody,
    CompletionBody,
    GenerationBody,
    ThinkingOptions,
)
from pagefleet_gateway.bodies.structured import Form, structure_of
from pagefleet_gateway.bodies.tools import ToolUse, tool_use
from pagefleet_gateway.errors import ApiError, bad_request
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.generation import Generation, Kind, Limits
from pagefleet_gateway.requests.prompts import (
    chat_prompt,
    completion_prompts,
    continued,
    echoed,
    newest_turns,
    predicted,
    truncated,
)
from pagefleet_gateway.requests.sampling import either, sampling_params
from pagefleet_gateway.resume import request_id
from pagefleet_gateway.sandbox.grammars import Structure
from pagefleet_gateway.tenants import prefix_salt
from pagefleet_gateway.text.reasoning import FAMILIES, reader

DEFAULT_COMPLETION_TOKENS: Final = 16

ANSWER_SHARE: Final = 4
"""One part in so many of the context is kept for an answer for which turns may be dropped."""

_LONGEST_TAG: Final = 16
"""Tokens in which a prompt may end with a tag of thoughts, and white space."""

_ID_PREFIXES: Final[dict[Kind, str]] = {
    "completion": "cmpl-",
    "chat": "chatcmpl-",
    "embedding": "embd-",
    "response": "resp_",
    "message": "msg_",
}


def understand_completion(content: bytes, model: ServedModel, limits: Limits) -> Generation:
    """Decide what a body of `/v1/completions` asks for."""
    parsed = parse(content, CompletionBody)
    body, model = parsed.body, model.named(parsed.body.model)
    check_shared(body, limits)
    n = body.n or 1
    best_of = body.best_of or n
    if best_of > n and body.use_beam_search:
        raise bad_request("best_of does not go with a beam search; use beam_width.", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens may be 0 only with echo.", "max_tokens")
    if best_of < n:
        raise bad_request(f"best_of is {best_of}, less than n, which is {n}.", "best_of")
    if best_of > n and body.stream:
        raise bad_request("best_of above n cannot be streamed.", "best_of")
    wanted = either(body.max_tokens, DEFAULT_COMPLETION_TOKENS)
    prompts = completion_prompts(body, model)
    prompts = truncated(body, prompts, limits, wanted)
    max_tokens = _room(prompts, "prompt", body.max_tokens, "max_tokens", wanted, limits)
    params = sampling_params(
        body,
        model,
        max_tokens=max_tokens,
        logprobs=0 if body.logprobs is None and best_of > n else body.logprobs,
        prompt_logprobs=either(body.logprobs if body.echo else None, body.prompt_logprobs, -1),
        structure=_structure(body, body.response_format, model),
    )
    echo = echoed(body, prompts, model) if body.echo else None
    check_echo(echo or [], best_of)
    run = uuid4().hex
    return Generation(
        kind="completion",
        id=answer_id("completion", body, limits),
        run=run,
        model=model.name,
        body=body,
        prompts=prompts,
        submits=submits_of(run, body, model, prompts, params, best_of, limits),
        n=n,
        best_of=best_of,
        logprobs=body.logprobs,
        echo=echo,
        ignored=parsed.ignored,
        strict=limits.strict,
        created=limits.created,
        shrinks=body.max_tokens is None,
    )


def understand_chat(content: bytes, model: ServedModel, limits: Limits) -> Generation:
    """Decide what a body of `/v1/chat/completions` asks for."""
    parsed = parse(content, ChatBody)
    body, model = parsed.body, model.named(parsed.body.model)
    check_shared(body, limits)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    field, asked = "max_completion_tokens", body.max_completion_tokens
    if asked is None:
        field, asked = "max_tokens", body.max_tokens
    if body.max_tokens not in (None, asked):
        raise bad_request("max_tokens and max_completion_tokens differ.", "max_tokens")
    conversation = Conversation(
        kind="chat",
        body=body,
        form=body.response_format,
        max_tokens=asked,
        ignored=parsed.ignored,
        names={"max_tokens": field},
    )
    return understand_conversation(conversation, model, limits)


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
    max_tokens = _room(prompts, conversation.name("messages"), asked, field, most, limits)
    structure = _structure(body, conversation.form, model, tools.structure)
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


def answer_id(kind: Kind, body: GenerationBody, limits: Limits) -> str:
    """What the client sees the answer called: as it wishes, behind the prefix of its kind."""
    return _ID_PREFIXES[kind] + (body.request_id or limits.request_id or uuid4().hex)


def _room(
    prompts: list[list[int]],
    prompt_field: str,
    asked: int | None,
    asked_field: str,
    default: float,
    limits: Limits,
) -> int:
    """Tokens to generate at most: as asked, or by default as many of `default` as fit."""
    if not all(prompts):
        raise bad_request(f"{prompt_field} has no tokens.", prompt_field)
    longest = max(map(len, prompts))
    fitting = limits.max_model_len - longest
    tokens = max(int(min(default, fitting)), 1) if asked is None else asked
    if tokens > fitting:
        fault = prompt_field if asked is None or fitting < 1 else asked_field
        more = f"{asked_field} asks for {asked} more"
        rest = "leaves no room for an answer" if asked is None else more
        raise too_long(limits, f"{prompt_field} has {longest} and {rest}", fault)
    return tokens


def too_long(limits: Limits, what: str, field: str) -> ApiError:
    """A 400 that says what there is no room for."""
    bound = f" ({limits.bound})" if limits.bound else ""
    most = f"This model's maximum context length is {limits.max_model_len} tokens{bound}"
    return bad_request(f"{most}, but {what}.", field, "context_length_exceeded")


def submits_of(
    run: str,
    body: GenerationBody,
    model: ServedModel,
    prompts: list[list[int]],
    params: SamplingParams,
    choices: int,
    limits: Limits,
) -> list[Submit]:
    """What the scheduler is asked for: of each prompt, as many choices of the same parameters."""
    tenant = limits.tenant
    salt = prefix_salt(tenant.digest, body.cache_salt, params.adapter)
    prediction = pack_ints(predicted(body, model))
    check_bounds(body, prompts, params, choices, prediction)
    ahead = window(body, params, len(prompts) * choices)
    return [
        Submit(
            request=request_id(run, number),
            attempt=0,
            prompt=pack_ints(tokens),
            params=params,
            choices=[ChoiceState(number * choices + i) for i in range(choices)],
            priority=body.priority or 0,
            salt=salt,
            left=body.timeout,
            window=ahead,
            tenant=tenant.name,
            weight=tenant.weight,
            prediction=prediction,
        )
        for number, tokens in enumerate(prompts)
    ]


def check_shared(body: CommonBody, limits: Limits) -> None:
    """Let a body pass whose fields, of those that several routes have, go together.

    Raises:
        ApiError: 400 that names the field.
    """
    if getattr(body, "stream_options", None) is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true.", "stream_options")
    for name in ("n", "best_of", "beam_width"):
        asked = getattr(body, name, None)
        if asked is not None and asked > limits.max_choices:
            text = f"{name} is {asked}, but {limits.max_choices} choices are the most here."
            raise bad_request(text, name)
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        asked = getattr(body, name, None)
        if asked is not None and asked > limits.max_logprobs and asked is not True:
            text = f"{name} is {asked}, but {limits.max_logprobs} alternatives are the most here."
            raise bad_request(text, name)


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


def _structure(
    body: GenerationBody,
    form: Form | None,
    model: ServedModel,
    call: Structure | None = None,
) -> Structure | None:
    """What the answer must read like, or its calls; what contradicts that is refused."""
    structure = call
    if call is None or call.free:
        structure = structure_of(form, body.structured_outputs, model.grammars) or call
    elif body.structured_outputs is not None:
        raise bad_request("structured_outputs leaves no room for a call.", "tool_choice")
    if structure is not None and body.min_tokens:
        raise bad_request(f"min_tokens does not go with {structure.field}.", "min_tokens")
    return structure
