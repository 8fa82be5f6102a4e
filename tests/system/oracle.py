"""What transformers' own `generate` says, in float32, and how far it can be relied on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel

from pagefleet.params import SamplingParams
from pagefleet.wire import Logprobs, unpack_floats

MARGIN = 1e-4
"""Between float32 implementations; where transformers' top two are closer, either is right."""

ROUNDING = 2e-5
"""A few times what float32 implementations differ by in a logprob."""

DISTURBED = 16
"""Searches with that much noise. Each finds a tie that rounding may break with one chance in two;
one prompt in 20,000 has such a tie.
"""

ALTERNATIVES = 3


@dataclass(frozen=True)
class Greedy:
    """A greedy answer of transformers."""

    tokens: list[int]
    logprobs: Tensor
    """[m, k]: the k most likely ones of each position, most likely first; the first is chosen."""

    @property
    def certain(self) -> int:
        """Positions before the first at which the top two are too close to call."""
        close = self.logprobs[:, 0] - self.logprobs[:, 1] < MARGIN
        return int(close.nonzero()[0]) if close.any() else len(self.tokens)

    def compare(self, tokens: Sequence[int], pieces: Sequence[Logprobs]) -> int:
        """Assert that an answer with ALTERNATIVES logprobs is this one; returns `certain`."""
        chosen = [value for piece in pieces for value in unpack_floats(piece.chosen)]
        top = [value for piece in pieces for value in unpack_floats(piece.top)]
        certain = self.compare_chosen(tokens, chosen)
        _assert_near(torch.tensor(top).view(-1, ALTERNATIVES)[:certain], self.logprobs[:certain])
        return certain

    def compare_chosen(self, tokens: Sequence[int], chosen: Sequence[float]) -> int:
        """The same, of an answer with the logprobs of its tokens alone."""
        certain = self.certain
        assert list(tokens[:certain]) == self.tokens[:certain]
        if certain == len(self.tokens):
            assert len(tokens) == certain
        _assert_near(torch.tensor(chosen[:certain]), self.logprobs[:certain, 0])
        return certain


class Beam(NamedTuple):
    """An answer of a beam search."""

    tokens: list[int]
    score: float


class Oracle:
    """One model of transformers."""

    def __init__(self, folder: Path, gguf_file: str | None = None) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=gguf_file, dtype=torch.float32
        )
        self.eos: int = self.model.config.eos_token_id

    def greedy(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Greedy]:
        """The greedy answer to each prompt."""
        ids, mask = self._pad(prompts)
        answers = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=self.eos,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logprobs = torch.stack(answers.logits, 1).log_softmax(-1).topk(ALTERNATIVES).values
        return [
            Greedy(tokens, logprobs[row, : len(tokens)])
            for row, answer in enumerate(answers.sequences[:, ids.shape[1] :].tolist())
            for tokens in [self._until_end(answer)]
        ]

    def beams(
        self, prompts: Sequence[list[int]], params: SamplingParams, noise: float = 0.0
    ) -> list[list[Beam]]:
        """The answers of the beam search of each prompt, best first, with `noise` in logprobs."""
        width, (ids, mask) = params.beam_width, self._pad(prompts)
        disturb = LogitsProcessorList(
            [lambda ids, logprobs: logprobs + noise * torch.randn_like(logprobs)]
        )
        never = params.early_stopping is None
        answers = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            logits_processor=disturb,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping="never" if never else params.early_stopping,
            pad_token_id=self.eos,
            output_scores=True,
            return_dict_in_generate=True,
        )
        found = [
            Beam(self._until_end(answer), score)
            for answer, score in zip(
                answers.sequences[:, ids.shape[1] :].tolist(),
                answers.sequences_scores.tolist(),
                strict=True,
            )
        ]
        return [found[first : first + width] for first in range(0, len(found), width)]

    def certain_beams(
        self, prompts: Sequence[list[int]], params: SamplingParams
    ) -> list[list[Beam] | None]:
        """The same; None where noise as large as ROUNDING changes which tokens are found."""
        found = self.beams(prompts, params)
        disturbed = self.beams([*prompts] * DISTURBED, params, ROUNDING)

        def is_certain(row: int) -> bool:
            others = disturbed[row :: len(prompts)]
            return all(_tokens(other) == _tokens(found[row]) for other in others)

        return [beams if is_certain(row) else None for row, beams in enumerate(found)]

    def _pad(self, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Ids and attention mask [prompts, longest], padded on the left."""
        longest = max(map(len, prompts))
        ids = [[self.eos] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids), torch.tensor(mask)

    def _until_end(self, answer: list[int]) -> list[int]:
        return answer[: answer.index(self.eos) + 1] if self.eos in answer else answer


def _assert_near(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=MARGIN)


def _tokens(beams: list[Beam]) -> list[list[int]]:
    return [beam.tokens for beam in beams]
