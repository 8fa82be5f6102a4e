"""Logits of which a few tokens have their own and all others the same: the sampler's plain twin.

`SparseLogits.choose` obeys the same parameters in the same order as `sampler.sample`, token by
token in plain Python. It differs in one thing: a token without a logit of its own is drawn only if
the bias or the allowed tokens name it, or if a grammar allows none of the others. (It has the logit
`FLOOR`, which at a temperature of 1 is less than the smallest weight of `sampler`.)
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from math import exp, inf, log
from re import finditer

from pagefleet.params import SamplingParams
from pagefleet.wire import Logprobs, pack_floats, pack_ints
from pagefleet_worker.sampling.draw import NO_TOKEN, Draw
from pagefleet_worker.sampling.philox import uniform

FLOOR = -30.0
"""Logit of a token that has none of its own."""


@dataclass(frozen=True)
class SparseLogits:
    """What is known of the next token, over a vocabulary of `size`."""

    size: int
    tokens: Sequence[int]
    """Ascending."""
    logits: Sequence[float]
    """Of these tokens."""

    def choose(self, draw: Draw) -> int:
        """The draw's token, or `NO_TOKEN` if the masks leave none."""
        tokens, scores = self._shaped(draw) if draw.is_shaped else (self.tokens, self.logits)
        if not tokens:
            return NO_TOKEN
        if draw.is_greedy:
            return tokens[scores.index(max(scores))]
        ends = list(accumulate(_shares_left(scores, draw.params)))
        u = uniform(draw.params.seed, draw.choice, draw.position)
        return tokens[bisect_right(ends, u * ends[-1])]

    def logprob(self, token: int) -> float:
        """Before masks, penalties and temperature."""
        return self._logit(token) - self._normalizer

    def top(self, count: int, mask: bytes | None = None) -> list[tuple[int, float]]:
        """The `count` most likely tokens and their logprobs, the lower id first of equal ones.

        Tokens outside the mask are of no probability.
        """
        if mask is None:
            logits, floor = self._own, FLOOR
        else:
            logits, floor = {token: self._logit(token) for token in self._all_allowed(mask)}, -inf
        ranked = sorted(logits.items(), key=lambda pair: -pair[1])
        if count > len(ranked):
            others = (token for token in range(self.size) if token not in logits)
            ranked += [(token, floor) for token in islice(others, count - len(ranked))]
        return [(token, logit - self._normalizer) for token, logit in ranked[:count]]

    def _shaped(self, draw: Draw) -> tuple[list[int], list[float]]:
        params, forbidden = draw.params, draw.forbidden()
        scores = {
            token: self._logit(token) + params.logit_bias.get(token, 0.0)
            for token in sorted(self._candidates(draw) - forbidden)
        }
        _penalize(scores, draw)
        return list(scores), list(scores.values())

    def _candidates(self, draw: Draw) -> set[int]:
        named, mask = draw.params.allowed_token_ids, draw.mask
        tokens = {*self.tokens, *draw.params.logit_bias} if named is None else set(named)
        if mask is None:
            return tokens
        allowed = {token for token in tokens if mask[token >> 3] >> (token & 7) & 1}
        return allowed if allowed or named is not None else set(self._all_allowed(mask))

    def _all_allowed(self, mask: bytes) -> list[int]:
        """Ascending; in the time of how many they are, not of how many there could be."""
        bits = f"{int.from_bytes(mask, 'little'):b}"[::-1]
        return [match.start() for match in finditer("1", bits[: self.size])]

    def _logit(self, token: int) -> float:
        return self._own.get(token, FLOOR)

    @cached_property
    def _own(self) -> dict[int, float]:
        return dict(zip(self.tokens, self.logits, strict=True))

    @cached_property
    def _normalizer(self) -> float:
        others = (self.size - len(self.tokens)) * exp(FLOOR)
        return log(sum(map(exp, self.logits)) + others)


def pack_logprobs(
    logits: Sequence[SparseLogits],
    tokens: Sequence[int],
    alternatives: int,
    mask: bytes | None = None,
) -> Logprobs:
    """Those of consecutive tokens, each with its own logits; the mask confines alternatives."""
    best = [pair for each in logits for pair in each.top(alternatives, mask)]
    chosen = [each.logprob(token) for each, token in zip(logits, tokens, strict=True)]
    return Logprobs(
        pack_floats(chosen),
        pack_ints(token for token, _ in best),
        pack_floats(logprob for _, logprob in best),
    )


def _penalize(scores: dict[int, float], draw: Draw) -> None:
    params = draw.params
    if params.repetition_penalty != 1:
        for token in scores.keys() & set(draw.history):
            if scores[token] < 0:
                scores[token] *= params.repetition_penalty
            else:
                scores[token] /= params.repetition_penalty
    if params.frequency_penalty or params.presence_penalty:
        counts = Counter(draw.history[draw.prompt_length :])
        for token in scores.keys() & counts.keys():
            penalty = params.frequency_penalty * counts[token] + params.presence_penalty
            scores[token] -= penalty


def _shares_left(scores: Sequence[float], params: SamplingParams) -> list[float]:
    """What temperature, top-k, top-p and min-p leave of the probabilities, as shares of the best
    token's.
    """
    best, temperature = max(scores), params.temperature
    shares = [exp((score - best) / temperature) for score in scores]
    if params.top_k or params.top_p < 1:
        _cut(shares, scores, params)
    if params.min_p:
        shares = [share if share >= params.min_p else 0.0 for share in shares]
    return shares


def _cut(shares: list[float], scores: Sequence[float], params: SamplingParams) -> None:
    """Set the shares outside top-k and top-p to 0."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    if 0 < params.top_k < len(order):
        kth = scores[order[params.top_k - 1]]
        kept = sum(score >= kth for score in scores)
    else:
        kept = len(order)
    before = [0.0, *accumulate(shares[index] for index in order[:kept])]
    kept = min(kept, bisect_left(before, params.top_p * before[-1]))
    for index in order[kept:]:
        shares[index] = 0.0
