"""A step that is launched and not answered yet.

Whatever it gives comes back to the host in one copy, ordered right behind it: the sampled tokens,
and the logprobs and embeddings that some of its requests ask for.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from pagefleet.wire import Floats, PromptLogprobs, Result, RowError, pack_ints
from pagefleet_worker.paging.slots import Slots, Step
from pagefleet_worker.paging.transfer import Download
from pagefleet_worker.sampling.draw import NO_TOKEN
from pagefleet_worker.sampling.embedding import Embedded
from pagefleet_worker.sampling.logprobs import DrawLogprobs, Ranked
from pagefleet_worker.sampling.samples import Samples


@dataclass(frozen=True, slots=True)
class PromptRanked:
    """`wire.PromptLogprobs` before it is read from the device."""

    row: int
    position: int
    ranked: Ranked


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step gives, on the device."""

    tokens: Tensor
    """int64, one for each draw"""
    logprobs: DrawLogprobs
    prompts: list[PromptRanked]
    embedded: Embedded | None

    def tensors(self) -> list[Tensor]:
        """The tokens, all of `logprobs` and `prompts`, and the states of `embedded`."""
        ranked = [each for _, each in self.logprobs.groups] + [each.ranked for each in self.prompts]
        parts = [tensor for each in ranked for tensor in (each.chosen, each.top_ids, each.top)]
        return [self.tokens, *parts, *([self.embedded.states] if self.embedded else [])]


@dataclass(slots=True)
class Pending:
    """A step that is launched: `Launched` of the interface."""

    step: Step
    slots: Slots
    samples: Samples
    computed: Computed
    started: float
    answers: Download
    """The tensors of `computed`."""
    _settled: list[int] | None = field(default=None)

    @classmethod
    def of(
        cls,
        step: Step,
        slots: Slots,
        samples: Samples,
        computed: Computed,
        started: float,
    ) -> Self:
        """Order the answers' way to the host."""
        return cls(step, slots, samples, computed, started, Download(computed.tensors()))

    def ready(self) -> bool:
        """Whether `result` would not wait for the device."""
        return self.answers.ready()

    def settle(self) -> list[int]:
        """Wait for the sampled tokens, write them into their slots once, and give them."""
        if self._settled is None:
            self._settled = self.answers.tensors()[0].tolist()
            last = dict(zip(self.samples.owners, self._settled, strict=True))
            for index in last.keys() - self._errors():
                self.slots.record(self.step.rows[index], [last[index]])
        return self._settled

    def result(self) -> Result:
        """Wait for the step and tell what it gave."""
        tokens, ranked, embeddings = self.settle(), self._ranked(), self._embeddings()
        groups = self.computed.logprobs.groups
        logprobs = DrawLogprobs([(draws, next(ranked)) for draws, _ in groups])
        errors = self._errors() | {
            row: "the model's hidden state is not finite"
            for row, embedding in embeddings.items()
            if embedding is None
        }
        return Result(
            epoch=self.step.epoch,
            step=self.step.number,
            tokens=pack_ints(tokens),
            logprobs=logprobs.to_wire(),
            prompts=[
                PromptLogprobs(prompt.row, prompt.position, next(ranked).to_wire())
                for prompt in self.computed.prompts
            ],
            errors=[RowError(*error) for error in sorted(errors.items())],
            micros=round((time.perf_counter() - self.started) * 1e6),
            embeddings=[(row, each) for row, each in embeddings.items() if each is not None],
        )

    def _embeddings(self) -> dict[int, Floats | None]:
        embedded = self.computed.embedded
        return {} if embedded is None else embedded.to_wire(self.answers.tensors()[-1])

    def _ranked(self) -> Iterator[Ranked]:
        """All of the logprobs, on the host."""
        parts = iter(self.answers.tensors()[1:])
        return map(Ranked, parts, parts, parts)

    def _errors(self) -> dict[int, str]:
        """Rows that went wrong, and why."""
        reason = "the model's logits are not finite, or no token is allowed"
        drawn = list(zip(self.samples.owners, self._settled or [], strict=True))
        failed = {}
        for index in {owner for owner, token in drawn if token == NO_TOKEN}:
            tokens = [token for owner, token in drawn if owner == index]
            if NO_TOKEN in tokens[: self.step.rows[index].taken(tokens)]:
                failed[index] = reason
        return failed | self.samples.refused
