"""The torch engine: a plan becomes tensors, a forward pass, tokens, a result.

    Slots.apply(plan) -> copies -> Batch -> Decoder.hidden -> logits -> sample -> Result

Only positions that are sampled get logits. Where a request asks for logprobs of its prompt, the
prompt's positions get them too, `_PROMPT_PIECE` at a time, because all of them at once could be
larger than the model.

A step is launched and settled. On a CPU it is settled at once: what it sampled stands in its slots
before the next plan comes. On a GPU that would make Python wait for the device, so sampled tokens
stay there, in `_sampled`, until the result is taken; a row whose input is one of them gets it on
the device. Only a request that penalizes what it said before makes the launch wait.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from pagefleet.wire import SAMPLED, Plan, PromptLogprobs, Result, RowError, pack_ints
from pagefleet_kernels.dispatch import Kernels
from pagefleet_worker.batch import Batch
from pagefleet_worker.causal_model import CausalModel
from pagefleet_worker.draw import NO_TOKEN, Draw
from pagefleet_worker.grammar import NO_GRAMMARS, Grammars, GuideError
from pagefleet_worker.interface import EngineFacts
from pagefleet_worker.logprobs import DrawLogprobs, Ranked, rank
from pagefleet_worker.pools import swap_blocks
from pagefleet_worker.sampler import sample
from pagefleet_worker.slots import Row, Slots, Step

_PROMPT_PIECE = 64
"""Prompt positions whose logits are held at once."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What a step draws: where its logits are taken, and every draw from them.

    positions: rows of the batch's hidden states, one for each row of the logits.
    owners: for each draw the index of its row.
    """

    positions: list[int]
    draws: list[Draw]
    owners: list[int]
    refused: dict[int, str] = field(default_factory=dict)
    """Rows whose grammar cannot be followed, and why."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Self:
        """All samples that `rows` order: by row, then by position, then by choice."""
        positions: list[int] = []
        draws: list[Draw] = []
        owners: list[int] = []
        for index, (row, batch_end) in enumerate(zip(rows, _batch_ends(rows), strict=True)):
            slot = row.slot
            for place in range(row.end - row.logits + 1, row.end + 1):
                history = slot.tokens if place >= len(slot.tokens) else slot.tokens[:place]
                output = place - slot.prompt_length
                draws += [
                    Draw(len(positions), slot.params, history, slot.prompt_length, choice, output)
                    for choice in slot.choices
                ]
                owners += [index] * len(slot.choices)
                positions.append(batch_end - row.end + place - 1)
        return cls(positions, draws, owners)

    def guide(self, rows: Sequence[Row], grammars: Grammars) -> None:
        """Let each draw's grammar say which tokens may come."""
        for at, (owner, draw) in enumerate(zip(self.owners, self.draws, strict=True)):
            slot = rows[owner].slot
            if slot.params.guide is None:
                continue
            try:
                mask = slot.mask(slot.prompt_length + draw.position, grammars)
            except GuideError as error:
                self.refused[owner] = str(error)
            else:
                self.draws[at] = replace(draw, mask=mask)


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
    tokens: Tensor
    """int64, one for each draw, on the device."""
    logprobs: DrawLogprobs
    prompts: list[PromptRanked]
    started: float
    _settled: list[int] | None = field(default=None)

    def settle(self) -> list[int]:
        """Wait for the sampled tokens, write them into their slots once, and give them."""
        if self._settled is None:
            self._settled = self.tokens.tolist()
            last = dict(zip(self.samples.owners, self._settled, strict=True))
            for index in last.keys() - self._errors():
                self.slots.record(self.step.rows[index], [last[index]])
        return self._settled

    def result(self) -> Result:
        """Wait for the step and tell what it gave."""
        tokens = self.settle()
        return Result(
            epoch=self.step.epoch,
            step=self.step.number,
            tokens=pack_ints(tokens),
            logprobs=self.logprobs.to_wire(),
            prompts=[
                PromptLogprobs(prompt.row, prompt.position, prompt.ranked.to_wire())
                for prompt in self.prompts
            ],
            errors=[RowError(*error) for error in sorted(self._errors().items())],
            micros=round((time.perf_counter() - self.started) * 1e6),
        )

    def _errors(self) -> dict[int, str]:
        """Rows that went wrong, and why."""
        reason = "the model's logits are not finite, or no token is allowed"
        drawn = zip(self.samples.owners, self._settled or [], strict=True)
        failed = {index: reason for index, token in drawn if token == NO_TOKEN}
        return failed | self.samples.refused


class TorchEngine:
    """Runs a model on one device; see `interface.Engine`."""

    def __init__(
        self,
        facts: EngineFacts,
        decoder: CausalModel,
        kernels: Kernels,
        pool: Tensor,
        *,
        settle_at_once: bool,
        grammars: Grammars = NO_GRAMMARS,
        host_pool: Tensor | None = None,
    ) -> None:
        self.facts = facts
        self.decoder = decoder
        self.kernels = kernels
        self.pool = pool
        self._host_pool = host_pool
        self._settle_at_once = settle_at_once
        self.grammars = grammars
        self._slots = Slots(
            facts.slots, facts.blocks, facts.block_size, facts.max_model_len, facts.host_blocks
        )
        self._sampled = torch.zeros(facts.slots, dtype=torch.int64, device=pool.device)
        self._last: Pending | None = None

    def reset(self) -> None:
        """Begin an epoch: forget every slot and block."""
        self._slots.clear()
        self._last = None

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        """Order a step.

        Raises:
            PlanError: the plan contradicts the epoch's history.
        """
        started = time.perf_counter()
        step = self._slots.apply(plan)
        self.grammars.prepare_all(plan.opens)
        self._move_blocks(step)
        if self._last is not None and _needs_history(step.rows):
            self._last.settle()
        samples = Samples.of(step.rows)
        tokens, logprobs, prompts = self._compute(step.rows, samples)
        pending = Pending(step, self._slots, samples, tokens, logprobs, prompts, started)
        if self._settle_at_once:
            pending.settle()
        self._last = pending
        return pending

    def _move_blocks(self, step: Step) -> None:
        if self._host_pool is not None and step.swap_out:
            swap_blocks(self.pool, self._host_pool, step.swap_out)
        if step.copies:
            pairs = torch.tensor(step.copies, device=self.pool.device)
            self.kernels.copy_blocks(self.pool, pairs)
        if self._host_pool is not None and step.swap_in:
            swap_blocks(self._host_pool, self.pool, step.swap_in)

    def _compute(
        self, rows: Sequence[Row], samples: Samples
    ) -> tuple[Tensor, DrawLogprobs, list[PromptRanked]]:
        if not rows:
            return torch.empty(0, dtype=torch.int64), DrawLogprobs([]), []
        device = self.pool.device
        batch = Batch.of(rows, self.facts.block_size, device)
        self._fill_in(rows, batch)
        hidden = self.decoder.hidden(batch, self.pool)
        samples.guide(rows, self.grammars)
        prompts = self._prompt_logprobs(rows, hidden)
        if not samples.draws:
            return torch.empty(0, dtype=torch.int64), DrawLogprobs([]), prompts
        positions = torch.tensor(samples.positions, device=device)
        logits = self.decoder.logits(hidden, positions)
        tokens = sample(logits, samples.draws)
        self._keep(rows, samples.owners, tokens)
        return tokens, DrawLogprobs.of(logits, samples.draws, tokens), prompts

    def _fill_in(self, rows: Sequence[Row], batch: Batch) -> None:
        """Put the tokens that are known on the device alone into the batch."""
        waiting = [index for index, row in enumerate(rows) if row.tokens[-1] == SAMPLED]
        if waiting:
            numbers = [rows[index].number for index in waiting]
            ends = batch.offsets[1:][waiting].long()
            batch.ids[ends - 1] = self._sampled[numbers].clamp(min=0)

    def _keep(self, rows: Sequence[Row], owners: list[int], tokens: Tensor) -> None:
        """Remember the last sample of each row for rows of the next step."""
        last = {rows[owner].number: index for index, owner in enumerate(owners)}
        self._sampled[list(last)] = tokens[list(last.values())]

    def _prompt_logprobs(self, rows: Sequence[Row], hidden: Tensor) -> list[PromptRanked]:
        """Logprobs of the prompt tokens that follow the inputs of the rows that ask for them."""
        found = []
        for index, (row, batch_end) in enumerate(zip(rows, _batch_ends(rows), strict=True)):
            slot, count = row.slot, row.slot.params.prompt_logprobs
            if count is None:
                continue
            end = min(row.end, slot.prompt_length - 1)
            for start in range(row.start, end, _PROMPT_PIECE):
                following = slot.tokens[start + 1 : min(start + _PROMPT_PIECE, end) + 1]
                first = batch_end - row.end + start
                inputs = torch.arange(first, first + len(following), device=hidden.device)
                tokens = torch.tensor(following, device=hidden.device, dtype=torch.int64)
                ranked = rank(self.decoder.logits(hidden, inputs), tokens, count)
                found.append(PromptRanked(index, start + 1, ranked))
        return found


def _batch_ends(rows: Sequence[Row]) -> Iterator[int]:
    """Where in the batch each row's tokens end."""
    return accumulate(len(row.tokens) for row in rows)


def _needs_history(rows: Sequence[Row]) -> bool:
    return any(row.logits and row.slot.params.reshapes_by_history for row in rows)
