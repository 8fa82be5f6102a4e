"""A step that is launched and not answered yet.

Whatever it gives comes back to the host in one copy, ordered right behind it: the sampled tokens,
and the logprobs that some of its requests ask for.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from pagefleet.wire import PromptLogprobs, Result, RowError, pack_ints
from pagefleet_worker.draw import NO_TOKEN
from pagefleet_worker.logprobs import DrawLogprobs, Ranked
from pagefleet_worker.samples import Samples
from pagefleet_worker.slots import Slots, Step
from pagefleet_worker.transfer import Download


@dataclass(frozen=True, slots=True)
class PromptRanked:
    """`wire.PromptLogprobs` before it is read from the device."""

    row: int
    position: int
    ranked: Ranked


@dataclass(slots=True)
class Pending:
    """A step that is launched: `Launched` of the interface."""

    step: Step
    slots: Slots
    samples: Samples
    logprobs: DrawLogprobs
    prompts: list[PromptRanked]
    started: float
    answers: Download
    """The tokens, int64, one for each draw; then all of `logprobs` and `prompts`."""
    _settled: list[int] | None = field(default=None)

    @classmethod
    def of(
        cls,
        step: Step,
        slots: Slots,
        samples: Samples,
        tokens: Tensor,
        logprobs: DrawLogprobs,
        prompts: list[PromptRanked],
        started: float,
    ) -> Self:
        """Order the answers' way to the host."""
        ranked = [each for _, each in logprobs.groups] + [each.ranked for each in prompts]
        parts = (tensor for each in ranked for tensor in (each.chosen, each.top_ids, each.top))
        answers = Download([tokens, *parts])
        return cls(step, slots, samples, logprobs, prompts, started, answers)

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
        tokens, ranked = self.settle(), self._ranked()
        logprobs = DrawLogprobs([(draws, next(ranked)) for draws, _ in self.logprobs.groups])
        return Result(
            epoch=self.step.epoch,
            step=self.step.number,
            tokens=pack_ints(tokens),
            logprobs=logprobs.to_wire(),
            prompts=[
                PromptLogprobs(prompt.row, prompt.position, next(ranked).to_wire())
                for prompt in self.prompts
            ],
            errors=[RowError(*error) for error in sorted(self._errors().items())],
            micros=round((time.perf_counter() - self.started) * 1e6),
        )

    def _ranked(self) -> Iterator[Ranked]:
        """All of `logprobs` and `prompts`, on the host."""
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
