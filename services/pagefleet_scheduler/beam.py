"""Beam search: which continuations of a request's beams live on, and which are answers.

The search keeps `width` running beams. Each step gives every beam its most likely next tokens; of
all these continuations the best max(2, 1 + end tokens) x width are looked at, in the order of their
summed logprobs. Those that end (a stop token, or the length) become answers if they are among the
first `width`; the best `width` others run on. An answer's score is its sum of logprobs divided by
its number of tokens to the power of `length_penalty`. The search ends when there are `width`
answers and no running beam can beat the worst of them, or when a grammar lets no beam go on:

    early_stopping   True    as soon as there are `width` answers
                     False   if the best running beam, scored at its present length, is worse
                     None    if it is worse even at the length, up to max_tokens, that suits it best

These are the rules of transformers' `generate`, so that answers and scores are equal to its own.
The search knows nothing about blocks: `advance` says which beam goes on with which token, and the
scheduler forks and frees (PagedAttention, Kwon et al., SOSP 2023, section 4.4).
"""

import math
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from pagefleet.params import SamplingParams
from pagefleet.wire import Finish, Logprobs, unpack_floats, unpack_ints


class Continuation(NamedTuple):
    """A beam and the token that it goes on with."""

    beam: int
    token: int
    score: float
    """Sum of logprobs, the token's included."""
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished beam."""

    score: float
    """After the length penalty."""
    tokens: "array[int]"
    logprobs: list[Logprobs]
    finish: Finish


@dataclass(slots=True)
class BeamSearch:
    """The state of one request's search."""

    params: SamplingParams
    scores: list[float] = field(default_factory=lambda: [0.0])
    """Sum of logprobs of each running beam, in the beams' order."""
    answers: list[Answer] = field(default_factory=list)
    """Best first, at most `width`."""

    @property
    def width(self) -> int:
        """Beams that run side by side."""
        return self.params.beam_width

    def advance(
        self,
        outputs: "list[array[int]]",
        pieces: list[list[Logprobs]],
        candidates: list[Logprobs],
    ) -> list[Continuation]:
        """Take one step of all running beams; returns how they go on, nothing if the search ends.

        Args:
            outputs: the tokens that each beam has generated so far.
            pieces: the logprobs of these tokens, if the client asked for them.
            candidates: the `params.candidates` most likely next tokens of each beam.
        """
        best = self._best(candidates)
        length = len(outputs[0]) + 1
        going: list[Continuation] = []
        for rank, each in enumerate(best):
            finish = self._finish(each.token, length)
            if finish is None:
                if len(going) < self.width:
                    going.append(each)
            elif rank < self.width:
                self._answer(each, outputs[each.beam], pieces[each.beam], length, finish)
        self.scores = [each.score for each in going]
        return [] if going and self._settled(length) else going

    def _best(self, candidates: list[Logprobs]) -> list[Continuation]:
        found = []
        for beam, each in enumerate(candidates):
            logprobs = unpack_floats(each.top)
            for rank, token in enumerate(unpack_ints(each.top_ids)):
                if logprobs[rank] == -math.inf:
                    break  # the grammar does not allow what follows
                score = self.scores[beam] + logprobs[rank]
                found.append((-score, beam, rank, token))
        found.sort()
        return [
            Continuation(beam, token, -negative, self._piece(candidates[beam], rank))
            for negative, beam, rank, token in found[: self.params.candidates]
        ]

    def _piece(self, candidates: Logprobs, rank: int) -> Logprobs | None:
        """What the client is told of a chosen token, if it asked."""
        count = self.params.logprobs
        if count is None:
            return None
        chosen = candidates.top[4 * rank : 4 * rank + 4]
        return Logprobs(chosen, candidates.top_ids[: 4 * count], candidates.top[: 4 * count])

    def _finish(self, token: int, length: int) -> Finish | None:
        if self.params.ends(token):
            return Finish.STOP
        return Finish.LENGTH if length >= self.params.max_tokens else None

    def _answer(
        self,
        last: Continuation,
        outputs: "array[int]",
        pieces: list[Logprobs],
        length: int,
        finish: Finish,
    ) -> None:
        score = last.score / length**self.params.length_penalty
        tokens = outputs + array("i", [last.token])
        if last.logprobs is not None:
            pieces = [*pieces, last.logprobs]
        self.answers.append(Answer(score, tokens, pieces, finish))
        self.answers.sort(key=lambda answer: -answer.score)
        del self.answers[self.width :]

    def _settled(self, length: int) -> bool:
        """Whether no running beam can become better than the worst of enough answers."""
        if len(self.answers) < self.width:
            return False
        if self.params.early_stopping:
            return True
        penalty = self.params.length_penalty
        if self.params.early_stopping is None and penalty > 0:
            length = self.params.max_tokens
        best: float = self.scores[0] / length**penalty
        return best <= self.answers[-1].score
