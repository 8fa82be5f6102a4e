"""What a body asks of a beam search, and what does not go with one.

A search follows the model's own logprobs: what would shape them is refused, not ignored. So are
stop strings, because the scheduler, which ends the beams, sees no text.
"""

from typing import Final, NamedTuple

from pagefleet_gateway.bodies.schema import GenerationBody
from pagefleet_gateway.errors import bad_request

_WITHOUT: Final[dict[str, object]] = {
    "beam_width": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
}
"""What may be said where there is no search: clients send what is so by default."""

_NEUTRAL: Final[dict[str, object]] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "bad_words": [],
    "allowed_token_ids": None,
    "min_tokens": 0,
}


class Beams(NamedTuple):
    """The fields of `SamplingParams` that say how to search."""

    width: int = 0
    """0 without a search."""
    length_penalty: float = 1.0
    early_stopping: bool | None = False
    """None is "never"."""


def beams_of(body: GenerationBody) -> Beams:
    """The search that a body asks for.

    Raises:
        ApiError: 400 that names the field.
    """
    if not body.use_beam_search:
        for name, neutral in _WITHOUT.items():
            if getattr(body, name) not in (None, neutral):
                raise bad_request(f"{name} needs use_beam_search to be true.", name)
        return Beams()
    if body.stop:
        raise bad_request("A beam search ends at stop_token_ids, not at stop strings.", "stop")
    for name, neutral in _NEUTRAL.items():
        if getattr(body, name) not in (None, neutral):
            raise bad_request(f"{name} does not go with a beam search.", name, "unsupported")
    n = body.n or 1
    width = body.beam_width or n
    if width < n:
        raise bad_request(f"beam_width is {width}, less than n, which is {n}.", "beam_width")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    early = None if body.early_stopping == "never" else bool(body.early_stopping)
    return Beams(width, penalty, early)
