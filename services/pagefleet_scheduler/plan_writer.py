"""A plan in the making: its rows, and what the worker has to be told for them.

A worker remembers what earlier plans said of a slot. So a row brings only what is new: for a slot
that opens, all that its sequence has; else the entries that its table gained since its last row.
"""

from pagefleet.wire import SAMPLED, Open, Plan, pack_ints, size_of
from pagefleet_scheduler.flights import PlannedRow
from pagefleet_scheduler.prompt_lookup import Drafts
from pagefleet_scheduler.sequence import Sequence

MOST_OPENED = 16 * 2**20
"""Bytes of opened slots after which a plan opens no more. Hundreds of sequences that share a long
prompt, or have large grammars, fit a step's budget, but not a frame.
"""


class PlanWriter:
    """What a plan will say, gathered row by row."""

    def __init__(self, with_full_tables: bool) -> None:
        self.planned: list[PlannedRow] = []
        self.copies: list[int] = []
        """Blocks to copy before the step: source, target, source ..."""
        self._with_full_tables = with_full_tables
        self._rows: list[int] = []
        self._tokens: list[int] = []
        self._opens: list[Open] = []
        self._opened = 0
        self._tables: list[int] = []
        self._full_tables: list[int] = []

    def __repr__(self) -> str:
        return f"<PlanWriter {len(self.planned)} rows, {len(self._tokens)} tokens>"

    @property
    def may_open(self) -> bool:
        """Whether the plan has room for what the worker must be told of a new slot."""
        return self._opened < MOST_OPENED

    def copy(self, sequence: Sequence, index: int, target: int) -> None:
        """Replace a block that a sequence shares by `target`, which gets the same content."""
        self.copies += (sequence.table[index], target)
        sequence.replace_block(index, target)
        if index < sequence.table_sent:
            assert sequence.slot is not None
            self._tables += (sequence.slot, index, target)

    def add_row(self, sequence: Sequence, count: int, drafts: Drafts) -> None:
        """Feed the next `count` positions of a sequence, for which it has blocks, then drafts."""
        request, slot = sequence.request, sequence.slot
        tokens, table = sequence.tokens, sequence.table
        assert slot is not None
        start, end, known = sequence.ordered, sequence.ordered + count, len(tokens)
        if not sequence.opened:
            self._opens.append(_open(sequence, slot))
            self._opened += size_of(self._opens[-1])
            sequence.opened = True
        if sequence.table_sent < len(table):
            for index in range(sequence.table_sent, len(table)):
                self._tables += (slot, index, table[index])
            sequence.table_sent = len(table)
        if self._with_full_tables:
            self._full_tables += table
        if start < known:
            self._tokens += tokens[start:end]
        if end > known:
            self._tokens.append(SAMPLED)
        if drafted := len(drafts.tokens):
            self._tokens += drafts.tokens
        fed = count + drafted
        samples_next = end == known + sequence.ahead and request.params.max_tokens > 0
        logits = 1 + drafted if samples_next else 0
        self._rows += (slot, start, fed, logits, len(table), sequence.checksum)
        samples = logits * len(sequence.choices)
        ahead = samples == 1 and request.search is None
        self.planned.append(PlannedRow(sequence, sequence.run, end, samples, ahead, drafts))
        sequence.ordered = start + fed
        sequence.ahead += ahead
        sequence.flying += 1

    def plan(
        self,
        epoch: int,
        step: int,
        slots: tuple[list[int], list[int]],
        swaps: tuple[list[int], list[int]],
    ) -> Plan:
        """The message.

        Args:
            epoch: the worker's.
            step: the plan's number.
            slots: `Plan.release` and `Plan.forks`.
            swaps: `Plan.swap_out` and `Plan.swap_in`.
        """
        return Plan(
            epoch=epoch,
            step=step,
            rows=pack_ints(self._rows),
            tokens=pack_ints(self._tokens),
            release=pack_ints(slots[0]),
            opens=self._opens,
            forks=pack_ints(slots[1]),
            tables=pack_ints(self._tables),
            copies=pack_ints(self.copies),
            full_tables=pack_ints(self._full_tables),
            swap_out=pack_ints(swaps[0]),
            swap_in=pack_ints(swaps[1]),
        )


def _open(sequence: Sequence, slot: int) -> Open:
    prompt = sequence.request.prompt
    return Open(
        slot,
        sequence.request.ordered_params,
        pack_ints(prompt),
        pack_ints(sequence.tokens[len(prompt) :]),
        sequence.choices.copy(),
        sequence.request.salt,
    )
