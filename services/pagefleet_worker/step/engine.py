"""The torch engine: a plan becomes tensors, a forward pass, tokens, a result.

    Slots.apply(plan) -> copies -> Inputs.hidden -> logits -> sample -> Result

Only positions that are sampled get logits. Where a request asks for logprobs of its prompt, the
prompt's positions get them too, `_PROMPT_PIECE` at a time, because all of them at once could be
larger than the model. A prompt whose embedding is wanted gets none (`embedding`).

A step is launched and settled. On a CPU it is settled at once: what it sampled stands in its slots
before the next plan comes. On a GPU that would make Python wait for the device, so sampled tokens
stay there until the result is taken, and a row whose input is one of them gets it there (`inputs`).
Only a request that penalizes what it said before makes the launch wait.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from pagefleet.wire import Plan
from pagefleet_kernels.dispatch import Kernels
from pagefleet_worker.grammar import NO_GRAMMARS, Grammars
from pagefleet_worker.interface import EngineFacts, PlanError
from pagefleet_worker.model.ranks import ALONE, Ranks
from pagefleet_worker.paging.causal_model import CausalModel
from pagefleet_worker.paging.slots import Row, Slots, Step
from pagefleet_worker.paging.swaps import Swaps
from pagefleet_worker.paging.transfer import telling_loss, to_device, use
from pagefleet_worker.sampling.embedding import Embedded
from pagefleet_worker.sampling.logprobs import DrawLogprobs, rank
from pagefleet_worker.sampling.sampler import sample
from pagefleet_worker.sampling.samples import Samples, batch_ends
from pagefleet_worker.step.inputs import HostInputs, Inputs
from pagefleet_worker.step.pending import Computed, Pending, PromptRanked
from pagefleet_worker.step.team import Team

_PROMPT_PIECE = 64
"""Prompt positions whose logits are held at once."""


class TorchEngine:
    """Runs a model on one device; see `interface.Engine`."""

    def __init__(
        self,
        facts: EngineFacts,
        decoder: CausalModel,
        kernels: Kernels,
        pool: Tensor,
        *,
        inputs: Inputs | None = None,
        grammars: Grammars = NO_GRAMMARS,
        swaps: Swaps | None = None,
        team: Team | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.facts = facts
        self.decoder = decoder
        self.kernels = kernels
        self.pool = pool
        self.team = team
        """None: all threads compute every step."""
        self._ranks = ranks
        self._swaps = swaps
        self._inputs = inputs or HostInputs(decoder, pool, facts.block_size)
        self.grammars = grammars
        self._slots = Slots(
            facts.slots, facts.blocks, facts.block_size, facts.max_model_len, facts.host_blocks
        )
        self._last: Pending | None = None

    def lives(self) -> bool:
        """It needs this process only."""
        return True

    def reset(self) -> None:
        """Begin an epoch: forget every slot and block."""
        self._slots.clear()
        self._last = None
        if self._swaps is not None:
            self._swaps.reset()

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        """Order a step.

        Raises:
            PlanError: the plan contradicts the epoch's history.
            DeviceLostError: there is no use in going on.
        """
        started = time.perf_counter()
        use(self.pool.device)
        with telling_loss(self.pool.device):
            return self._order(plan, started)

    def _order(self, plan: Plan, started: float) -> Pending:
        self._check_adapters(plan)
        step = self._slots.apply(plan)
        self._inputs.update(step)
        self.grammars.prepare_all(plan.opens)
        self._move_blocks(step)
        if self._last is not None and _needs_history(step.rows):
            self._last.settle()
        samples = Samples.of(step.rows)
        with self._threads_for(step.rows):
            computed = self._compute(step.rows, samples)
        if self._swaps is not None:
            self._swaps.end(step)
        pending = Pending.of(step, self._slots, samples, computed, started)
        if self._inputs.settle_at_once:
            pending.settle()
        self._last = pending
        return pending

    def _check_adapters(self, plan: Plan) -> None:
        for order in plan.opens:
            if not 0 <= order.params.adapter <= self.decoder.adapters:
                raise PlanError(f"there is no adapter {order.params.adapter}")

    def _move_blocks(self, step: Step) -> None:
        if self._swaps is not None:
            self._swaps.take_out(step)
        if step.copies:
            pairs = to_device(step.copies, self.pool.device)
            self.kernels.copy_blocks(self.pool, pairs)
        if self._swaps is not None:
            self._swaps.bring_in(step)

    def _threads_for(self, rows: Sequence[Row]) -> AbstractContextManager[None]:
        if self.team is None or not rows:
            return nullcontext()
        return self.team.at_work(sum(len(row.tokens) for row in rows))

    def _compute(self, rows: Sequence[Row], samples: Samples) -> Computed:
        if not rows:
            return Computed(self._nothing(), DrawLogprobs([]), [], None)
        hidden = self._inputs.hidden(rows)
        samples.guide(rows, self.grammars)
        prompts, embedded = self._prompt_logprobs(rows, hidden), Embedded.of(rows, hidden)
        if not samples.draws:
            return Computed(self._nothing(), DrawLogprobs([]), prompts, embedded)
        positions = to_device(samples.positions, self.pool.device)
        logits = self.decoder.logits(hidden, positions)
        tokens = self._ranks.agree(sample(logits, samples.draws, self.kernels.sample))
        self._keep(rows, samples.owners, tokens)
        asked = DrawLogprobs.of(logits, samples.draws, tokens, self.kernels.log_softmax)
        return Computed(tokens, asked, prompts, embedded)

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.pool.device)

    def _keep(self, rows: Sequence[Row], owners: list[int], tokens: Tensor) -> None:
        """Remember the last sample of each row for rows of the next step."""
        last = {rows[owner].number: index for index, owner in enumerate(owners)}
        if len(last) < len(owners):
            tokens = tokens[to_device(list(last.values()), tokens.device)]
        self._inputs.keep(list(last), tokens)

    def _prompt_logprobs(self, rows: Sequence[Row], hidden: Tensor) -> list[PromptRanked]:
        """Logprobs of the prompt tokens that follow the inputs of the rows that ask for them."""
        found = []
        for index, (row, batch_end) in enumerate(zip(rows, batch_ends(rows), strict=True)):
            slot, count = row.slot, row.slot.params.prompt_logprobs
            if count is None:
                continue
            end = min(row.end, slot.prompt_length - 1)
            for start in range(row.start, end, _PROMPT_PIECE):
                following = slot.tokens[start + 1 : min(start + _PROMPT_PIECE, end) + 1]
                first = batch_end - row.end + start
                inputs = torch.arange(first, first + len(following), device=hidden.device)
                tokens = to_device(following, hidden.device, np.int64)
                logits = self.decoder.logits(hidden, inputs)
                ranked = rank(logits, tokens, count, self.kernels.log_softmax)
                found.append(PromptRanked(index, start + 1, ranked))
        return found


def _needs_history(rows: Sequence[Row]) -> bool:
    return any(row.logits and row.slot.params.reshapes_by_history for row in rows)
