"""How a body wants its tokens chosen, as `SamplingParams` without gaps."""

from typing import Final, TypeVar

from pagefleet.params import SamplingParams
from pagefleet_gateway.bodies.beams import beams_of
from pagefleet_gateway.bodies.schema import GenerationBody
from pagefleet_gateway.errors import bad_request
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.prompts import encode
from pagefleet_gateway.sandbox.grammars import Structure

_MAX_BIAS: Final = 100.0

MAX_BAD_WORD_TOKENS: Final = 16_384
"""Of all bad words, as they are spelt at the start of a text and within one."""

_T = TypeVar("_T")


def sampling_params(
    body: GenerationBody,
    model: ServedModel,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int,
    structure: Structure | None,
) -> SamplingParams:
    """Parameters of the body, then of the model, then neutral; -1 wants no prompt logprobs.

    Raises:
        ApiError: 400 that names the field.
    """
    if not model.manifest.writes:
        text = "This model has no head that chooses tokens; ask it for embeddings."
        raise bad_request(text, "model", "unsupported")
    defaults = model.manifest.sampling
    allowed = body.allowed_token_ids
    beams = beams_of(body)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            seed=model.seeds.getrandbits(64) if body.seed is None else body.seed % 2**64,
            temperature=either(body.temperature, defaults.temperature, 1.0),
            top_p=either(body.top_p, defaults.top_p, 1.0),
            top_k=max(either(body.top_k, defaults.top_k, 0), 0),
            min_p=either(body.min_p, defaults.min_p, 0.0),
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            repetition_penalty=either(body.repetition_penalty, defaults.repetition_penalty, 1.0),
            min_tokens=body.min_tokens or 0,
            eos_token_ids=model.eos_token_ids if structure or not body.ignore_eos else (),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logit_bias=_logit_bias(body.logit_bias or {}),
            bad_words=_bad_words(body.bad_words or [], model),
            allowed_token_ids=None if allowed is None else tuple(allowed),
            logprobs=logprobs,
            prompt_logprobs=None if prompt_logprobs < 0 else prompt_logprobs,
            beam_width=beams.width,
            length_penalty=beams.length_penalty,
            early_stopping=beams.early_stopping,
            guide=structure.guide(bool(body.ignore_eos)) if structure else None,
            adapter=model.adapter,
        ).check_vocabulary(model.manifest.vocab_size)
    except ValueError as error:
        sentence = str(error)
        raise bad_request(f"{sentence}.", sentence.partition(" ")[0]) from error


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise bad_request("logit_bias must have token ids as its keys.", "logit_bias")
    return {int(token): min(max(bias, -_MAX_BIAS), _MAX_BIAS) for token, bias in biases.items()}


def _bad_words(words: list[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The ids of each word, as it is spelt at the start of a text and within one."""
    spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
    encoded = encode(spellings, "bad_words", model, add_special_tokens=False)
    found = tuple(dict.fromkeys(tuple(tokens) for tokens in encoded if tokens))
    if (count := sum(map(len, found))) > MAX_BAD_WORD_TOKENS:
        text = f"bad_words has {count} tokens, but {MAX_BAD_WORD_TOKENS} are the most."
        raise bad_request(text, "bad_words")
    return found


def either(*values: _T | None) -> _T:
    """The first that is not None; the last is not."""
    return next(value for value in values if value is not None)
