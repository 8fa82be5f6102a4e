"""One token to choose, and what its request's parameters say of it on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet.params import SamplingParams

GREEDY = 1e-5
"""Below it a temperature counts as 0."""

NO_TOKEN = -1
"""Instead of a token: the logits hold NaN or infinity, or the masks leave nothing."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose."""

    logits: int
    """Row of the logits."""
    params: SamplingParams
    history: Sequence[int]
    """Ids of the prompt and of the outputs before this position; an `array` costs least."""
    prompt_length: int
    choice: int
    """The choice's number over the whole HTTP request."""
    position: int
    """Of the token among the outputs: 0 is the first that is generated."""
    mask: bytes | None = None
    """What the request's grammar allows: bit i, little-endian, is set for token i."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.params.temperature < GREEDY

    @property
    def is_shaped(self) -> bool:
        """Whether masks, bias or penalties change the logits."""
        params = self.params
        return (
            params.reshapes_by_history
            or params.allowed_token_ids is not None
            or self.mask is not None
            or bool(params.logit_bias)
            or self.position < params.min_tokens
        )

    @property
    def confines(self) -> bytes | None:
        """The mask that alternatives obey too: a beam goes on with one of them."""
        return self.mask if self.params.beam_width else None

    def forbidden(self) -> set[int]:
        """Tokens that bad words and `min_tokens` rule out at this position."""
        tokens: set[int] = set()
        for length, endings in self.params.bad_endings.items():
            start = len(self.history) - length
            if start >= 0:
                tokens.update(endings.get(tuple(self.history[start:]), ()))
        if self.position < self.params.min_tokens:
            tokens.update(self.params.eos_token_ids, self.params.stop_token_ids)
        return tokens
