"""A worker's side of the plan: slots and their block tables, checked against every order.

The scheduler sends only what changes (`wire.Plan`); this module holds the rest. It is the same for
every engine. Nothing here trusts the plan: a slot that is opened twice, a table whose checksum is
another, a row that skips a position or a step number out of order is a `PlanError`, because to go
on would be to write one sequence's keys into another's blocks.

A slot's history is `tokens`: the prompt and the outputs that are known here. A row's input tokens
that lie beyond it are appended; those that lie within it must be equal. `record` appends what the
engine sampled, which is what the scheduler means by `SAMPLED` in the next step.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    ROW_FIELDS,
    SAMPLED,
    Ints,
    Open,
    Plan,
    checksum,
    pack_ints,
    unpack_ints,
)
from pagefleet_worker.grammar import DisobeyedError, Grammars, Guided, GuideError
from pagefleet_worker.interface import PlanError


@dataclass(slots=True)
class Slot:
    """One running sequence, as a worker remembers it."""

    params: SamplingParams
    prompt_length: int
    tokens: "array[int]"
    """The prompt and every output known here."""
    choices: list[int]
    """Choices to sample for at each position; several only until their first token."""
    salt: bytes
    table: "array[int]" = field(default_factory=lambda: array("i"))
    """Physical block of each logical block."""
    checksum: int = 0
    """Of the table."""
    fed: int | None = None
    """Positions fed so far; None: the first row says where the prefix hits end."""
    on_trial: int = 0
    """Tokens at the end of the history that are drafts: the next row says which of them stay."""
    guided: Guided | None = None
    """Its place in its grammar, from when it is first needed."""

    @classmethod
    def opened(cls, order: Open) -> "Slot":
        """Begin as the scheduler says.

        Raises:
            PlanError: it names what is no token.
        """
        tokens = unpack_ints(order.prompt)
        length = len(tokens)
        tokens.extend(unpack_ints(order.output))
        _check_ids(tokens)
        return cls(order.params, length, tokens, list(order.choices), order.salt)

    @classmethod
    def bare(cls, blocks: Iterable[int], adapter: int = 0) -> "Slot":
        """Of no request: for what is computed before there are any, over some blocks."""
        params = SamplingParams(max_tokens=0, seed=0, adapter=adapter)
        return cls(params, 0, array("i"), [0], b"", array("i", blocks))

    def forked(self, choice: int) -> "Slot":
        """A copy that samples for one choice."""
        return Slot(
            self.params,
            self.prompt_length,
            self.tokens[:],
            [choice],
            self.salt,
            self.table[:],
            self.checksum,
            self.fed,
        )

    def mask(self, place: int, grammars: Grammars) -> bytes | None:
        """What its grammar allows at `place` (see `Draw.mask`); None without a grammar, and behind
        a draft with which it cannot be followed: whatever follows such a draft is dropped.

        Raises:
            GuideError: the grammar cannot be followed.
        """
        if self.params.guide is None:
            return None
        if self.guided is None:
            self.guided = grammars.begin(self.params.guide)
        try:
            return self.guided.mask(self.tokens[self.prompt_length : place])
        except GuideError as error:
            if place <= len(self.tokens) - self.on_trial:
                raise
            if not isinstance(error, DisobeyedError):
                self.guided = None  # from such an error there is no way back
            return None


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step."""

    number: int
    """Of the slot."""
    slot: Slot
    start: int
    """Position of the first input token."""
    tokens: "array[int]"
    """Input ids; the last may be `SAMPLED`: the engine launched the step that gives it, and has
    not recorded it yet."""
    logits: int
    """Sample at this many of the last positions."""

    @property
    def end(self) -> int:
        """Position after the last input token: where the last sample will stand."""
        return self.start + len(self.tokens)

    @property
    def adapter(self) -> int:
        """The number of its LoRA adapter; 0 for none."""
        return self.slot.params.adapter

    @property
    def embeds(self) -> bool:
        """Whether it ends a prompt whose embedding is wanted."""
        slot = self.slot
        return slot.params.embedding is not None and self.end == slot.prompt_length

    def taken(self, samples: Sequence[int]) -> int:
        """How many of the samples at its last positions can be outputs: none behind a draft that
        was not sampled, or behind the end of the choice, is.
        """
        drafts = self.tokens[len(self.tokens) - self.logits + 1 :]
        for number, (draft, sample) in enumerate(zip(drafts, samples, strict=False), 1):
            if draft != sample or self.slot.params.ends(sample):
                return number
        return len(samples)


@dataclass(frozen=True, slots=True)
class Step:
    """A plan, checked and applied to the slots: what is left is to compute."""

    epoch: int
    number: int
    rows: list[Row]
    forked: list[tuple[int, int]]
    """(target slot, source slot)"""
    deltas: list[tuple[int, int, int]]
    """(slot, index, block)"""
    copies: list[tuple[int, int]]
    """(source block, target block)"""
    swap_out: list[tuple[int, int]]
    """(device block, host block), before the copies"""
    swap_in: list[tuple[int, int]]
    """(host block, device block), after the copies"""


class Slots:
    """All slots of a worker in one epoch."""

    def __init__(
        self, count: int, blocks: int, block_size: int, max_tokens: int, host_blocks: int = 0
    ) -> None:
        self.count = count
        self.blocks = blocks
        self.host_blocks = host_blocks
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.clear()

    def __repr__(self) -> str:
        return f"<Slots {len(self._open)} of {self.count} open, step {self._step}>"

    def clear(self) -> None:
        """Begin an epoch."""
        self._open: dict[int, Slot] = {}
        self._step: int | None = None

    def apply(self, plan: Plan) -> Step:
        """Take a plan's orders in their order and give what is to be computed.

        Raises:
            PlanError: the plan contradicts what came before it.
        """
        if self._step is not None and plan.step != self._step + 1:
            raise PlanError(f"step {plan.step} came after step {self._step}")
        self._step = plan.step
        for number in unpack_ints(plan.release):
            self._slot(number)
            del self._open[number]
        for order in plan.opens:
            self._begin(order.slot, Slot.opened(order))
        forked = [self._fork(*triple) for triple in _triples(plan.forks)]
        deltas = _triples(plan.tables)
        self._update_tables(deltas)
        copies = _pairs(plan.copies)
        for pair in copies:
            for block in pair:
                self._check_block(block)
        swap_out, swap_in = _pairs(plan.swap_out), _pairs(plan.swap_in)
        for host, device in [*((host, device) for device, host in swap_out), *swap_in]:
            self._check_block(device)
            if not 0 <= host < self.host_blocks:
                raise PlanError(f"block {host} is outside the host pool of {self.host_blocks}")
        rows = self._rows(plan)
        return Step(plan.epoch, plan.step, rows, forked, deltas, copies, swap_out, swap_in)

    def record(self, row: Row, tokens: Sequence[int]) -> None:
        """Append what was sampled for a row at its last position to the slot's history.

        Samples of a slot with several choices, of a beam or behind drafts are not its history: the
        scheduler says how it goes on.
        """
        slot = row.slot
        goes_on = len(slot.choices) == 1 and row.logits == 1 and not slot.params.beam_width
        if goes_on and len(slot.tokens) == row.end:
            slot.tokens.append(tokens[-1])

    def check(self) -> None:
        """Assert the invariants: checksums are those of the tables, and all blocks exist."""
        assert len(self._open) <= self.count
        for slot in self._open.values():
            assert slot.checksum == checksum(pack_ints(slot.table))
            assert all(0 <= block < self.blocks for block in slot.table)
            assert slot.choices

    def _slot(self, number: int) -> Slot:
        try:
            return self._open[number]
        except KeyError:
            raise PlanError(f"slot {number} is not open") from None

    def _begin(self, number: int, slot: Slot) -> None:
        if number in self._open or not 0 <= number < self.count:
            raise PlanError(f"slot {number} cannot be opened: it is open, or out of range")
        if not slot.choices:
            raise PlanError(f"slot {number} was opened without a choice")
        self._open[number] = slot

    def _fork(self, target: int, source: int, choice: int) -> tuple[int, int]:
        slot = self._slot(source).forked(choice)
        if target == source:
            self._open[source] = slot
        else:
            self._begin(target, slot)
        return target, source

    def _check_block(self, block: int) -> None:
        if not 0 <= block < self.blocks:
            raise PlanError(f"block {block} is outside the pool of {self.blocks}")

    def _update_tables(self, deltas: list[tuple[int, int, int]]) -> None:
        changed: dict[int, Slot] = {}
        for number, index, block in deltas:
            self._check_block(block)
            slot = changed[number] = self._slot(number)
            if index == len(slot.table):
                slot.table.append(block)
            elif 0 <= index < len(slot.table):
                slot.table[index] = block
            else:
                raise PlanError(f"slot {number}: entry {index} of a table of {len(slot.table)}")
        for slot in changed.values():
            slot.checksum = checksum(pack_ints(slot.table))

    def _rows(self, plan: Plan) -> list[Row]:
        rows: list[Row] = []
        tokens, at = unpack_ints(plan.tokens), 0
        full, full_at = unpack_ints(plan.full_tables), 0
        for number, start, count, logits, length, crc in zip(
            *_columns(plan.rows, ROW_FIELDS), strict=True
        ):
            slot = self._slot(number)
            row = Row(number, slot, start, tokens[at : at + count], logits)
            at += count
            if (len(slot.table), slot.checksum) != (length, crc):
                raise PlanError(f"slot {number}: its block table is not the scheduler's")
            if full:
                if slot.table != full[full_at : full_at + length]:
                    raise PlanError(f"slot {number}: its block table differs, entry by entry")
                full_at += length
            if row.end > length * self.block_size or row.end > self.max_tokens:
                raise PlanError(f"slot {number}: position {row.end - 1} has no block")
            if not 1 <= count == len(row.tokens) or not 0 <= logits <= count:
                raise PlanError(f"slot {number}: {count} tokens with {logits} logits")
            self._take_input(row)
            rows.append(row)
        if at != len(tokens) or len({row.number for row in rows}) != len(rows):
            raise PlanError("the rows and the tokens of the plan do not fit each other")
        return rows

    def _take_input(self, row: Row) -> None:
        known, tokens = row.slot.tokens, row.tokens
        fed = len(known) if row.slot.fed is None else row.slot.fed
        if not 0 <= row.start <= fed:
            raise PlanError(f"slot {row.number}: position {row.start} skips tokens")
        row.slot.fed = row.end
        if row.slot.on_trial:
            del known[max(row.start, len(known) - row.slot.on_trial) :]
        row.slot.on_trial = max(row.logits - 1, 0)
        if tokens[-1] == SAMPLED:
            if row.end - 1 < len(known):
                tokens[-1] = known[row.end - 1]
            elif row.end - 1 > len(known) or len(tokens) > 1:
                raise PlanError(f"slot {row.number}: the sampled input was never sampled")
            else:
                return
        within = known[row.start : row.end]
        if tokens[: len(within)] != within:
            raise PlanError(f"slot {row.number}: its input differs from its history")
        _check_ids(tokens)
        known.extend(tokens[len(within) :])


def _check_ids(tokens: "array[int]") -> None:
    if min(tokens, default=0) < 0:
        raise PlanError(f"{min(tokens)} is no token")


def _columns(packed: Ints, width: int) -> "list[array[int]]":
    values = unpack_ints(packed)
    if len(values) % width:
        raise PlanError(f"a list of {width}-tuples has {len(values)} integers")
    return [values[column::width] for column in range(width)]


def _pairs(packed: Ints) -> list[tuple[int, int]]:
    first, second = _columns(packed, 2)
    return list(zip(first, second, strict=True))


def _triples(packed: Ints) -> list[tuple[int, int, int]]:
    first, second, third = _columns(packed, 3)
    return list(zip(first, second, third, strict=True))
