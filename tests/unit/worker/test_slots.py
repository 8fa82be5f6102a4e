"""A worker's slots follow a right plan and refuse a wrong one, whatever is wrong with it."""

from array import array

import msgspec
import pytest

from pagefleet.params import Guide, SamplingParams
from pagefleet.wire import SAMPLED, Open, Plan, checksum, pack_ints
from pagefleet_worker.grammar import GuideError
from pagefleet_worker.interface import PlanError
from pagefleet_worker.paging.slots import Row, Slot, Slots
from tests.byte_grammars import byte_grammars

PARAMS = SamplingParams(max_tokens=8, seed=1)
SIZE = 4


def opened(choices: list[int] | None = None, slot: int = 0, prompt: int = 6) -> Open:
    return Open(slot, PARAMS, pack_ints(range(prompt)), b"", choices or [0])


def plan(step: int, rows: list[tuple[int, ...]], tokens: list[int], **orders: object) -> Plan:
    """Rows are (slot, start, count, logits, table); their tables' checksums are the true ones."""
    columns: list[int] = []
    for *head, table in rows:
        columns += (*head, len(table), checksum(pack_ints(table)))
    packed = {
        name: pack_ints(value) if isinstance(value, list) and name != "opens" else value
        for name, value in orders.items()
    }
    return Plan(1, step, pack_ints(columns), pack_ints(tokens), **packed)  # type: ignore[arg-type]


@pytest.fixture
def slots() -> Slots:
    slots = Slots(count=4, blocks=10, block_size=SIZE, max_tokens=40)
    first = plan(
        0, [(0, 0, 6, 1, [5, 7])], list(range(6)), opens=[opened()], tables=[0, 0, 5, 0, 1, 7]
    )
    (row,) = slots.apply(first).rows
    slots.record(row, [50])
    slots.check()
    return slots


def test_a_sampled_input_is_filled_in(slots: Slots) -> None:
    (row,) = slots.apply(plan(1, [(0, 6, 1, 1, [5, 7])], [SAMPLED])).rows
    assert (list(row.tokens), row.end, list(row.slot.tokens[6:])) == ([50], 7, [50])


def test_a_sampled_input_that_is_not_recorded_yet_stays_open(slots: Slots) -> None:
    slots.apply(plan(1, [(0, 6, 1, 1, [5, 7])], [SAMPLED]))
    (row,) = slots.apply(plan(2, [(0, 7, 1, 1, [5, 7])], [SAMPLED])).rows
    assert list(row.tokens) == [SAMPLED]


def test_an_input_that_is_told_must_be_the_one_that_is_known(slots: Slots) -> None:
    slots.apply(plan(1, [(0, 6, 1, 1, [5, 7])], [50]))
    with pytest.raises(PlanError, match="differs from its history"):
        slots.apply(plan(2, [(0, 5, 1, 1, [5, 7])], [9]))


def test_choices_fork_with_table_and_history(slots: Slots) -> None:
    slots.apply(
        plan(
            1,
            [(1, 0, 6, 1, [1, 2])],
            list(range(6)),
            opens=[opened([0, 1], slot=1)],
            tables=[1, 0, 1, 1, 1, 2],
        )
    )
    step = slots.apply(
        plan(
            2,
            [(1, 6, 1, 1, [1, 2]), (2, 6, 1, 1, [1, 3])],
            [60, 61],
            forks=[2, 1, 1, 1, 1, 0],
            tables=[2, 1, 3],
            copies=[2, 3],
        )
    )
    assert [(row.slot.choices, list(row.slot.tokens[6:])) for row in step.rows] == [
        ([0], [60]),
        ([1], [61]),
    ]
    assert (step.copies, step.forked) == ([(2, 3)], [(2, 1), (1, 1)])
    slots.check()


RIGHT = {"step": 1, "rows": [(0, 6, 1, 1, [5, 7])], "tokens": [50]}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"step": 2}, "step 2 came after step 0"),
        ({"step": 0}, "step 0 came after step 0"),
        ({"rows": [(1, 6, 1, 1, [5, 7])]}, "slot 1 is not open"),
        ({"rows": [(0, 6, 1, 1, [5, 8])]}, "not the scheduler's"),
        ({"rows": [(0, 6, 1, 1, [5])]}, "not the scheduler's"),
        ({"rows": [(0, 8, 1, 1, [5, 7])]}, "position 8 has no block"),
        ({"rows": [(0, 7, 1, 1, [5, 7])]}, "skips tokens"),
        ({"rows": [(0, 6, 1, 2, [5, 7])]}, "1 tokens with 2 logits"),
        ({"rows": [(0, 6, 1, 1, [5, 7])] * 2, "tokens": [50, 50]}, "do not fit"),
        ({"tokens": [51]}, "differs from its history"),
        ({"tokens": [50, 50]}, "do not fit"),
        ({"tokens": []}, "1 tokens with 1 logits"),
        ({"release": [3]}, "slot 3 is not open"),
        ({"release": [0]}, "slot 0 is not open"),
        ({"rows": [(0, 6, 2, 1, [5, 7])], "tokens": [50, -7]}, "-7 is no token"),
        ({"opens": [Open(1, PARAMS, pack_ints([5, -2]), b"", [0])]}, "-2 is no token"),
        ({"opens": [opened()]}, "cannot be opened"),
        ({"opens": [opened(slot=4)]}, "cannot be opened"),
        ({"forks": [0, 3, 0]}, "slot 3 is not open"),
        ({"forks": [0, 3]}, "3-tuples has 2"),
        ({"tables": [0, 3, 1]}, "entry 3 of a table of 2"),
        ({"tables": [0, 2, 10]}, "block 10 is outside"),
        ({"copies": [5, -1]}, "block -1 is outside"),
        ({"full_tables": [5, 8]}, "entry by entry"),
    ],
)
def test_what_contradicts_the_slots(slots: Slots, wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        slots.apply(plan(**(RIGHT | wrong)))  # type: ignore[arg-type]


def test_what_does_not(slots: Slots) -> None:
    right = plan(**RIGHT, full_tables=[5, 7])  # type: ignore[arg-type]
    (row,) = slots.apply(msgspec.convert(msgspec.to_builtins(right), Plan)).rows
    assert row.slot.table == array("i", [5, 7])


def test_a_new_epoch_starts_from_nothing(slots: Slots) -> None:
    slots.clear()
    with pytest.raises(PlanError, match="slot 0 is not open"):
        slots.apply(plan(**(RIGHT | {"step": 0})))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafts", "samples", "taken"),
    [([], [8], 1), ([], [8, 9, 8], 3), ([8, 9], [8, 9, 4], 3), ([8, 9], [8, 4, 4], 2),
     ([8, 9], [4, 9, 4], 1), ([8, 3], [8, 3, 4], 2), ([8], [3, 4], 1)],
)  # fmt: skip
def test_samples_behind_a_wrong_draft_or_an_end_are_not_taken(
    drafts: list[int], samples: list[int], taken: int
) -> None:
    params = SamplingParams(max_tokens=8, seed=1, stop_token_ids=(3,))
    slot = Slot(params, 2, array("i", [1, 2]), [0], b"")
    row = Row(0, slot, 0, array("i", [1, 2, *drafts]), 1 + len(drafts))
    assert row.taken(samples) == taken


def test_a_draft_with_which_a_grammar_takes_too_much_work_leaves_no_trace() -> None:
    """Behind an x there are more rules than a parser may look at, behind a y there is one."""
    rules = range(3000)
    grammar = f'start: "y" "z" | "x" many\nmany: {" | ".join(f"r{n}" for n in rules)}\n'
    grammar += "".join(f'r{n}: "a"\n' for n in rules)
    params = SamplingParams(max_tokens=8, seed=1, guide=Guide(grammar))
    grammars = byte_grammars(200, (3,))
    slot = Slot(params, 1, array("i", [1, ord("x")]), [0], b"", on_trial=1)
    first = slot.mask(1, grammars)
    assert slot.mask(2, grammars) is None
    slot.tokens[1:], slot.on_trial = array("i", [ord("y")]), 0
    assert slot.mask(1, grammars) == first
    assert int.from_bytes(slot.mask(2, grammars) or b"", "little") == 1 << ord("z")
    slot.tokens[1] = ord("x")
    with pytest.raises(GuideError, match="items"):
        slot.mask(2, grammars)
