"""EchoEngine: an engine without weights whose every token checks all that lies before it.

It runs plans over slots and a paged pool as the torch engine does. A row reads every cell before
its start through its block table at every step, appends its input tokens' cells, writes them
through the table, and draws from the hash (`echo_decoder`). Nothing is remembered beside the pool,
so a lost, repeated or reordered token, an aliased or stale block, a wrong prefix hit and a missed
copy all show in the stream, which `echo_tokens` says in advance.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagefleet import faultpoints
from pagefleet.wire import Floats, Logprobs, Plan, PromptLogprobs, Result, RowError, pack_ints
from pagefleet_worker.grammar import GuideError
from pagefleet_worker.interface import EngineFacts
from pagefleet_worker.paging.slots import Row, Slots
from pagefleet_worker.sampling.draw import NO_TOKEN, Draw
from pagefleet_worker.sampling.sparse_logits import SparseLogits, pack_logprobs
from pagefleet_worker.simulated.echo_decoder import (
    CELL,
    Chain,
    EchoDecoder,
    embedding_of,
    owner_of,
    poison,
)


class CellPool:
    """The KV pool: cells in blocks."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self.blocks = [poison(block, block_size) for block in range(blocks)]

    def read(self, table: Sequence[int], length: int) -> bytes:
        """The cells of the first `length` positions."""
        blocks = -(-length // self._block_size)
        cells = b"".join(map(self.blocks.__getitem__, table[:blocks]))
        return cells[: length * CELL.size]

    def write(self, table: Sequence[int], start: int, cells: bytes) -> None:
        """Put cells at the positions from `start` on."""
        width = self._block_size * CELL.size
        at = start * CELL.size
        end = at + len(cells)
        while at < end:
            index, offset = divmod(at, width)
            part = cells[len(cells) - (end - at) :][: width - offset]
            old = self.blocks[table[index]]
            self.blocks[table[index]] = old[:offset] + part + old[offset + len(part) :]
            at += len(part)


@dataclass(slots=True)
class _Answer:
    """What a step gives, while its rows are computed."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)
    embeddings: list[tuple[int, Floats]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was computed when it was launched."""

    _result: Result

    def ready(self) -> bool:
        """It is."""
        return True

    def result(self) -> Result:
        """What it gave."""
        return self._result


class EchoEngine:
    """Runs plans without weights; see `interface.Engine`.

    step_seconds: how long a step of these rows takes; the result reports it.
    sleep: lets that time pass.
    """

    def __init__(
        self,
        facts: EngineFacts,
        decoder: EchoDecoder,
        progress: Callable[[], None],
        step_seconds: Callable[[Sequence[Row]], float] = lambda rows: 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.facts = facts
        self._decoder = decoder
        self._progress = progress
        self._step_seconds = step_seconds
        self._sleep = sleep
        self.reset()

    def lives(self) -> bool:
        """It needs this process only."""
        return True

    def reset(self) -> None:
        """Begin an epoch: forget every slot and block."""
        facts = self.facts
        self._slots = Slots(
            facts.slots, facts.blocks, facts.block_size, facts.max_model_len, facts.host_blocks
        )
        self._pool = CellPool(facts.blocks, facts.block_size)
        self._host = [
            poison(facts.blocks + block, facts.block_size) for block in range(facts.host_blocks)
        ]

    def launch(self, plan: Plan) -> Done:
        """Run a step.

        Raises:
            PlanError: the plan contradicts the epoch's history.
        """
        step = self._slots.apply(plan)
        self._decoder.grammars.prepare_all(plan.opens)
        for block, host in step.swap_out:
            self._host[host] = self._pool.blocks[block]
        for source, target in step.copies:
            self._pool.blocks[target] = self._pool.blocks[source]
        for host, block in step.swap_in:
            self._pool.blocks[block] = self._host[host]
        answer = _Answer()
        for index, row in enumerate(step.rows):
            self._compute(index, row, answer)
            self._progress()
        seconds = self._step_seconds(step.rows)
        if seconds:
            self._sleep(seconds)
            self._progress()
        return Done(
            Result(
                step.epoch,
                step.number,
                pack_ints(answer.tokens),
                answer.logprobs,
                answer.prompts,
                answer.errors,
                round(seconds * 1e6),
                answer.embeddings,
            )
        )

    def _compute(self, index: int, row: Row, answer: _Answer) -> None:
        slot = row.slot
        chain = Chain(self._pool.read(slot.table, row.start))
        owner = owner_of(slot.salt, slot.params.adapter)
        alternatives = slot.params.prompt_logprobs
        prompt_end = 0 if alternatives is None else slot.prompt_length - 1
        first_drawn = row.end - row.logits
        cells, prompt = [], []
        for position, token in enumerate(row.tokens, row.start):
            cells.append(chain.append(token, position, owner))
            if position < prompt_end:
                prompt.append(self._decoder.logits(chain.digest()))
            if position >= first_drawn:
                self._draw(index, row, position + 1, self._decoder.logits(chain.digest()), answer)
        self._pool.write(slot.table, row.start, b"".join(cells))
        if row.embeds and slot.params.embedding is not None:
            answer.embeddings.append((index, embedding_of(chain.digest(), slot.params.embedding)))
        if prompt and alternatives is not None:
            following = slot.tokens[row.start + 1 : row.start + 1 + len(prompt)]
            logprobs = pack_logprobs(prompt, following, alternatives)
            answer.prompts.append(PromptLogprobs(index, row.start + 1, logprobs))

    def _draw(
        self, index: int, row: Row, place: int, logits: SparseLogits, answer: _Answer
    ) -> None:
        """Choose the tokens that will stand at `place`, one for each choice."""
        slot, params = row.slot, row.slot.params
        history = slot.tokens if place >= len(slot.tokens) else slot.tokens[:place]
        position = place - slot.prompt_length
        try:
            mask = slot.mask(place, self._decoder.grammars)
        except GuideError as error:
            answer.tokens.extend([NO_TOKEN] * len(slot.choices))
            answer.errors.append(RowError(index, str(error)))
            return
        chosen = [
            logits.choose(Draw(0, params, history, slot.prompt_length, choice, position, mask))
            for choice in slot.choices
        ]
        behind_drafts = place > row.end - row.logits + 1
        if not behind_drafts and faultpoints.corrupts("echo.logits"):
            chosen = [NO_TOKEN] * len(chosen)  # as of NaN
        if params.logprobs is not None:
            for number, token in enumerate(chosen, len(answer.tokens)):
                confines = mask if params.beam_width else None
                packed = pack_logprobs([logits], [max(token, 0)], params.logprobs, confines)
                answer.logprobs.append((number, packed))
        answer.tokens.extend(chosen)
        if NO_TOKEN in chosen:
            drawn = answer.tokens[-len(chosen) * (place - row.end + row.logits) :]
            if row.taken(drawn) == len(drawn):
                answer.errors.append(RowError(index, "the masks leave no token to choose"))
        elif place == row.end:
            self._slots.record(row, chosen)
