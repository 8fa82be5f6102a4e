"""What a body asks for, decided: prompts as token ids, parameters without gaps, lengths that fit.

A `Generation` is all that the rest of the gateway knows of a request. The choices of an HTTP
request are numbered over all its prompts: choice i of prompt k has index k * best_of + i at the
scheduler, so that equal prompts in a list are sampled differently.

Understanding a body tokenizes, so it is not for the event loop. Whatever is not acceptable raises
an `ApiError`: 400 that names the field, or 404 for a model that is not served.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal
from uuid import uuid4

from msgspec import structs

from pagefleet.params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams
from pagefleet.wire import ChoiceState, Submit, pack_ints
from pagefleet_gateway.errors import bad_request, http_error
from pagefleet_gateway.grammars import Structure
from pagefleet_gateway.message import MessageForm
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.parsing import parse
from pagefleet_gateway.prompts import (
    chat_prompt,
    completion_prompts,
    continued,
    echoed,
    predicted,
    truncated,
)
from pagefleet_gateway.reasoning import THINKS_AT_ONCE
from pagefleet_gateway.resume import Had, Ticket, request_id
from pagefleet_gateway.sampling import either, sampling_params
from pagefleet_gateway.schema import ChatBody, CompletionBody, GenerationBody
from pagefleet_gateway.structured import structure_of
from pagefleet_gateway.tenants import EVERYBODY, Tenant, prefix_salt
from pagefleet_gateway.tools import ToolUse, tool_use

DEFAULT_COMPLETION_TOKENS: Final = 16
STREAM_WINDOW: Final = 256
"""Tokens of a choice that are generated ahead of a client that does not read."""


@dataclass(frozen=True)
class Limits:
    """What holds for a request besides the model's own limits."""

    max_model_len: int
    """Tokens that prompt and output may have together."""
    tenant: Tenant = EVERYBODY
    """Who asks."""
    request_id: str | None = None
    """Names the answer, where the body does not; drawn where neither does."""
    max_choices: int = MAX_CHOICES
    """That one prompt may have."""
    max_logprobs: int = MAX_LOGPROBS
    """Alternatives that may be asked for at a position."""
    strict: bool = False
    """Answers end only for reasons that the OpenAI API knows."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A request that is understood."""

    kind: Literal["completion", "chat", "response"]
    id: str
    """As the client sees it."""
    run: str
    """Tells this run of the request from all others: see `resume.request_id`."""
    model: str
    body: GenerationBody
    prompts: list[list[int]]
    submits: list[Submit]
    """One for each prompt, with the same parameters."""
    n: int
    """Choices the client gets for each prompt."""
    best_of: int
    """Choices that are generated for each prompt."""
    logprobs: int | None
    """Alternatives to show beside each token; None shows no logprobs."""
    echo: list[str] | None
    """The text of each prompt, where it is to precede the answer."""
    ignored: list[str]
    """Fields of the body of which nothing is known."""
    message: MessageForm | None = None
    """How the text is to be parted; None: it is content."""
    keeps_special: bool = False
    """Special tokens are part of the text."""
    strict: bool = False
    """See `Limits`."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of its beginning."""
    had: Mapping[int, Had] = field(default_factory=dict)
    """What the client of a resumed stream has of each choice; empty if it begins."""

    @property
    def by_token(self) -> bool:
        """Whether it is told token by token, in events that do not depend on what came together."""
        return self.kind == "response"

    def passed_over(self, index: int) -> int:
        """Tokens of a choice that a resumed client has and that need not be looked at.

        Events that are counted are made again from the first token.
        """
        return 0 if self.by_token or index not in self.had else self.had[index].count

    @property
    def unfinished(self) -> list[Submit]:
        """Those of `submits` that are to be generated: all but what a resumed client has whole."""
        return [
            submit
            for submit in self.submits
            if not all(choice.finished for choice in submit.choices)
        ]

    @property
    def params(self) -> SamplingParams:
        """Of every prompt."""
        return self.submits[0].params

    @property
    def stop(self) -> list[str]:
        """Strings that end a choice."""
        stop = self.body.stop
        return [stop] if isinstance(stop, str) else stop or []

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer goes on with the prompt's text, rather than being one of its own."""
        return isinstance(self.body, CompletionBody) or bool(
            isinstance(self.body, ChatBody) and self.body.continue_final_message
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        options = self.body.stream_options
        return bool(options and options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream says the usage so far."""
        options = self.body.stream_options
        return bool(options and options.continuous_usage_stats)


def understand_completion(content: bytes, model: ServedModel, limits: Limits) -> Generation:
    """Decide what a body of `/v1/completions` asks for."""
    parsed = parse(content, CompletionBody)
    body = parsed.body
    _check_shared(body, model, limits)
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
    prompts = truncated(body, prompts, limits.max_model_len - wanted)
    max_tokens = _room(prompts, "prompt", body.max_tokens, "max_tokens", wanted, limits)
    params = sampling_params(
        body,
        model,
        max_tokens=max_tokens,
        logprobs=0 if body.logprobs is None and best_of > n else body.logprobs,
        prompt_logprobs=either(body.logprobs if body.echo else None, body.prompt_logprobs, -1),
        structure=_structure(body, model),
    )
    run = uuid4().hex
    return Generation(
        kind="completion",
        id="cmpl-" + _name(body, limits),
        run=run,
        model=model.name,
        body=body,
        prompts=prompts,
        submits=_submits(run, body, model, prompts, params, best_of, limits),
        n=n,
        best_of=best_of,
        logprobs=body.logprobs,
        echo=echoed(body, prompts, model) if body.echo else None,
        ignored=parsed.ignored,
        strict=limits.strict,
    )


def understand_chat(content: bytes, model: ServedModel, limits: Limits) -> Generation:
    """Decide what a body of `/v1/chat/completions` asks for."""
    parsed = parse(content, ChatBody)
    body = parsed.body
    _check_shared(body, model, limits)
    n = body.n or 1
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
    field, asked = "max_completion_tokens", body.max_completion_tokens
    if asked is None:
        field, asked = "max_tokens", body.max_tokens
    if asked == 0:
        raise bad_request(f"{field} must be at least 1.", field)
    if body.max_tokens not in (None, asked):
        raise bad_request("max_tokens and max_completion_tokens differ.", "max_tokens")
    room = limits.max_model_len - either(asked, 1)
    tools = _tools(body, model)
    prompts = truncated(body, [chat_prompt(body, model, tools.shown)], room)
    fitting = limits.max_model_len - len(prompts[0])
    max_tokens = _room(prompts, "messages", asked, field, fitting, limits)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    structure = _structure(body, model, tools.structure)
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
        kind="chat",
        id="chatcmpl-" + _name(body, limits),
        run=run,
        model=model.name,
        body=body,
        prompts=prompts,
        submits=_submits(run, body, model, prompts, params, n, limits),
        n=n,
        best_of=n,
        logprobs=logprobs,
        echo=[continued(body)] if body.echo else None,
        ignored=parsed.ignored,
        strict=limits.strict,
        message=_message(tools, model, guided=structure is not None and not structure.free),
        keeps_special=tools.keeps_special,
    )


def ticket_of(generation: Generation, model: ServedModel, tenant: bytes) -> Ticket:
    """What makes a stream again, besides its body."""
    seed, fingerprint = generation.params.seed, model.manifest.fingerprint
    return Ticket(generation.id, generation.created, generation.run, seed, fingerprint, tenant)


def resumed(
    generation: Generation, model: ServedModel, ticket: Ticket, had: Mapping[int, Had]
) -> Generation:
    """The same generation as the one that gave the ticket, for a client that has some of it.

    Raises:
        ApiError: 410, another model wrote it, or it has other choices.
    """
    if ticket.model != model.manifest.fingerprint:
        text = "This stream cannot be resumed: another model wrote it."
        raise http_error(410, text, "gone")
    if had.keys() != {choice.index for each in generation.submits for choice in each.choices}:
        raise http_error(410, "This stream cannot be resumed: it had other choices.", "gone")
    params = structs.replace(generation.params, seed=ticket.seed)
    submits = [
        structs.replace(
            submit,
            params=params,
            choices=[
                ChoiceState(choice.index, finished=had[choice.index].finished)
                for choice in submit.choices
            ],
            continues=request_id(ticket.run, number),
        )
        for number, submit in enumerate(generation.submits)
    ]
    return replace(generation, id=ticket.answer, created=ticket.created, submits=submits, had=had)


def _name(body: GenerationBody, limits: Limits) -> str:
    return body.request_id or limits.request_id or uuid4().hex


def _room(
    prompts: list[list[int]],
    prompt_field: str,
    asked: int | None,
    asked_field: str,
    default: int,
    limits: Limits,
) -> int:
    """Tokens to generate at most: as asked, or by default as many of `default` as fit."""
    if not all(prompts):
        raise bad_request(f"{prompt_field} has no tokens.", prompt_field)
    longest = max(map(len, prompts))
    fitting = limits.max_model_len - longest
    tokens = max(min(default, fitting), 1) if asked is None else asked
    if tokens > fitting:
        fault = prompt_field if asked is None or fitting < 1 else asked_field
        raise bad_request(
            f"This model's maximum context length is {limits.max_model_len} tokens, but "
            f"{prompt_field} has {longest} and {asked_field} asks for {tokens} more.",
            fault,
            "context_length_exceeded",
        )
    return tokens


def _submits(
    run: str,
    body: GenerationBody,
    model: ServedModel,
    prompts: list[list[int]],
    params: SamplingParams,
    choices: int,
    limits: Limits,
) -> list[Submit]:
    tenant = limits.tenant
    salt = prefix_salt(tenant.digest, body.cache_salt)
    prediction = pack_ints(predicted(body, model))
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
            window=STREAM_WINDOW if body.stream and not params.beam_width else 0,
            tenant=tenant.name,
            weight=tenant.weight,
            prediction=prediction,
        )
        for number, tokens in enumerate(prompts)
    ]


def _check_shared(body: GenerationBody, model: ServedModel, limits: Limits) -> None:
    model.check_name(body.model)
    if body.stream_options is not None and not body.stream:
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


def _tools(body: ChatBody, model: ServedModel) -> ToolUse:
    parallel = body.parallel_tool_calls is not False
    return tool_use(body.tools, body.tool_choice, parallel, model.tool_call_parser, model.grammars)


def _message(tools: ToolUse, model: ServedModel, guided: bool) -> MessageForm | None:
    """How an answer is to be read; one that obeys a grammar holds no thoughts."""
    thinks = None
    if model.reasoning_parser is not None and not guided:
        thinks = THINKS_AT_ONCE[model.reasoning_parser]
    if thinks is None and tools.script is None:
        return None
    return MessageForm(thinks, tools.script, tools.parallel)


def _structure(
    body: GenerationBody, model: ServedModel, call: Structure | None = None
) -> Structure | None:
    """What the answer must read like, or its calls; what contradicts that is refused."""
    structure = structure_of(body.response_format, body.structured_outputs, model.grammars)
    if structure is not None and call is not None and not call.free:
        raise bad_request(f"{structure.field} leaves no room for a call.", "tool_choice")
    structure = structure or call
    if structure is not None and body.min_tokens:
        raise bad_request(f"min_tokens does not go with {structure.field}.", "min_tokens")
    return structure
