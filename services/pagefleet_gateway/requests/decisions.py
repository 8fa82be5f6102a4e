"""What all routes decide alike, of the parts of a `Generation`.

Names of answers, lengths that fit, what an answer must read like, and what the scheduler is told.
"""

from typing import Final
from uuid import uuid4

from pagefleet.params import SamplingParams
from pagefleet.wire import ChoiceState, Submit, pack_ints
from pagefleet_gateway.bodies.bounds import check_bounds, window
from pagefleet_gateway.bodies.schema import CommonBody, GenerationBody
from pagefleet_gateway.bodies.structured import Form, structure_of
from pagefleet_gateway.errors import ApiError, bad_request
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.generation import Kind, Limits
from pagefleet_gateway.requests.prompts import predicted
from pagefleet_gateway.resume import request_id
from pagefleet_gateway.sandbox.grammars import Structure
from pagefleet_gateway.tenants import prefix_salt

_ID_PREFIXES: Final[dict[Kind, str]] = {
    "completion": "cmpl-",
    "chat": "chatcmpl-",
    "embedding": "embd-",
    "response": "resp_",
    "message": "msg_",
}


def answer_id(kind: Kind, body: GenerationBody, limits: Limits) -> str:
    """What the client sees the answer called: as it wishes, behind the prefix of its kind."""
    return _ID_PREFIXES[kind] + (body.request_id or limits.request_id or uuid4().hex)


def room_for(
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


def structure_for(
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
