"""A body becomes a `Generation`: prompts are encoded, parameters completed, lengths compared.

It tokenizes, so it is not for the event loop. Whatever is not acceptable raises an `ApiError`: 400
that names the field, or 404 for a model that is not served. Here are completions and chats; what
other APIs call a conversation is in the modules named for them.
"""

from typing import Final
from uuid import uuid4

from pagefleet_gateway.bodies.bounds import check_echo
from pagefleet_gateway.bodies.parsing import parse
from pagefleet_gateway.bodies.schema import ChatBody, CompletionBody
from pagefleet_gateway.errors import bad_request
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.conversation import Conversation, understand_conversation
from pagefleet_gateway.requests.decisions import (
    answer_id,
    check_shared,
    room_for,
    structure_for,
    submits_of,
)
from pagefleet_gateway.requests.generation import Generation, Limits
from pagefleet_gateway.requests.prompts import completion_prompts, echoed, truncated
from pagefleet_gateway.requests.sampling import either, sampling_params

DEFAULT_COMPLETION_TOKENS: Final = 16


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
    max_tokens = room_for(prompts, "prompt", body.max_tokens, "max_tokens", wanted, limits)
    params = sampling_params(
        body,
        model,
        max_tokens=max_tokens,
        logprobs=0 if body.logprobs is None and best_of > n else body.logprobs,
        prompt_logprobs=either(body.logprobs if body.echo else None, body.prompt_logprobs, -1),
        structure=structure_for(body, body.response_format, model),
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
