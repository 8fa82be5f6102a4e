"""What a device remembers of the slots gives the batches that the host lays out by itself."""

import random
from array import array
from dataclasses import fields

import pytest
import torch

from pagefleet.params import SamplingParams
from pagefleet_worker.paging.batch import Batch
from pagefleet_worker.paging.device_slots import DeviceSlots, pack_rows
from pagefleet_worker.paging.slots import Row, Slot, Step
from pagefleet_worker.step.graphs import DecodeGraphs, graph_sizes
from tests.gpu_twin import Recorder

SLOTS, WIDTH, BLOCK_SIZE, BLOCKS = 6, 5, 4, 50
CPU = torch.device("cpu")


@pytest.fixture
def generator() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def slots() -> DeviceSlots:
    return DeviceSlots(SLOTS, WIDTH, BLOCK_SIZE, BLOCKS, CPU)


def step_of(
    deltas: list[tuple[int, int, int]], forked: list[tuple[int, int]] | None = None
) -> Step:
    return Step(1, 0, [], forked or [], deltas, [], [], [])


def row_of(number: int, table: list[int], start: int, tokens: list[int], adapter: int = 0) -> Row:
    params = SamplingParams(max_tokens=1, seed=0, adapter=adapter)
    slot = Slot(params, 1, array("i", [1]), [0], b"")
    slot.table.extend(table)
    return Row(number, slot, start, array("i", tokens), 0)


def random_tables(slots: DeviceSlots, generator: random.Random) -> list[list[int]]:
    """Tables that grew, changed and were forked on the device, and what they are."""
    tables: list[list[int]] = [[] for _ in range(SLOTS)]
    for _ in range(30):
        forked = []
        if generator.random() < 0.3:
            target, source = generator.sample(range(SLOTS), 2)
            forked.append((target, source))
            tables[target] = list(tables[source])
        deltas = []
        for number in generator.sample(range(SLOTS), 3):
            index = min(len(tables[number]), generator.randrange(WIDTH))
            block = generator.randrange(BLOCKS)
            tables[number][index : index + 1] = [block]
            deltas.append((number, index, block))
        slots.update(step_of(deltas, forked))
    return tables


@pytest.mark.parametrize("adapters", [0, 3])
def test_batches_are_those_of_the_host(
    adapters: int, slots: DeviceSlots, generator: random.Random
) -> None:
    tables = random_tables(slots, generator)
    rows = []
    for number in generator.sample(range(SLOTS), 4):
        room = len(tables[number]) * BLOCK_SIZE
        start = generator.randrange(room)
        count = generator.randint(1, room - start)
        tokens = generator.choices(range(99), k=count)
        adapter = generator.randint(0, adapters) if rows else adapters
        rows.append(row_of(number, tables[number], start, tokens, adapter))
    width = max(-(-row.end // BLOCK_SIZE) for row in rows)
    packed = torch.from_numpy(pack_rows(rows, adapted=adapters > 0))
    found = slots.batch(packed, len(rows), width, adapted=adapters > 0)
    expected = Batch.of(rows, BLOCK_SIZE, CPU)
    for row, length in enumerate(-(-row.end // BLOCK_SIZE) for row in rows):
        found.tables[row, length:] = 0  # the host does not know what it never reads
    assert (found.adapters is None) == (expected.adapters is None) == (adapters == 0)
    for field in fields(Batch)[: None if adapters else -1]:
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name)), field.name


def test_forks_follow_each_other(slots: DeviceSlots) -> None:
    slots.update(step_of([(0, 0, 7), (1, 0, 8), (1, 1, 9)]))
    slots.update(step_of([(3, 1, 5), (3, 1, 6)], [(2, 0), (3, 2), (2, 1)]))
    assert slots.tables[3].tolist() == [7, 6, 0, 0, 0]
    assert slots.tables[2].tolist() == [8, 9, 0, 0, 0]


def test_blocks_beyond_the_longest_sequence_are_left_out(slots: DeviceSlots) -> None:
    slots.update(step_of([(0, WIDTH, 3), (0, 1, 4)]))
    assert slots.tables[:SLOTS].sum() == 4


def test_the_last_sample_is_filled_in(slots: DeviceSlots) -> None:
    slots.keep([4, 2], torch.tensor([70, -1]))
    rows = [row_of(4, [1], 2, [-1]), row_of(0, [2], 1, [5]), row_of(2, [3], 0, [-1])]
    batch = slots.batch(torch.from_numpy(pack_rows(rows)), 3, 1)
    assert batch.ids[:3].tolist() == [70, 5, 0]


def test_graphs_are_padded_by_rows_that_touch_the_spare_block_only(slots: DeviceSlots) -> None:
    seen: list[Batch] = []

    def forward(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return batch.positions.double()

    graphs = DecodeGraphs(forward, slots, [1, 4], Recorder())
    slots.update(step_of([(0, 0, 7), (1, 0, 9)]))
    hidden = graphs.hidden([row_of(1, [9], 2, [33]), row_of(0, [7], 3, [44])])
    assert hidden is not None
    assert hidden.tolist() == [2, 3, 0, 0]
    batch = seen[-1]
    assert batch.ids.tolist() == [33, 44, 0, 0]
    assert batch.slots.tolist() == [38, 31, BLOCKS * BLOCK_SIZE, BLOCKS * BLOCK_SIZE]
    assert batch.offsets.tolist() == [0, 1, 2, 3, 4]
    assert batch.tables[2:].unique().tolist() == [BLOCKS]


def test_drafts_take_the_places_of_rows_in_a_graph(slots: DeviceSlots) -> None:
    seen: list[Batch] = []

    def forward(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return batch.positions.double()

    graphs = DecodeGraphs(forward, slots, [1, 6], Recorder())
    slots.update(step_of([(1, 0, 9), (1, 1, 4), (0, 0, 7)]))
    hidden = graphs.hidden([row_of(1, [9, 4], 2, [33, 34, 35]), row_of(0, [7], 3, [44])])
    assert hidden is not None
    assert hidden.tolist() == [2, 3, 4, 3, 0, 0]
    batch, spare = seen[-1], BLOCKS * BLOCK_SIZE
    assert batch.ids[:6].tolist() == [33, 34, 35, 44, 0, 0]
    assert batch.slots.tolist() == [38, 39, 16, 31, spare, spare]
    assert batch.offsets.tolist() == [0, 3, 4, 5, 6, 6, 6]


def test_steps_with_adapters_have_graphs_of_their_own(slots: DeviceSlots) -> None:
    seen: list[Batch] = []

    def forward(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        return batch.positions.double()

    graphs = DecodeGraphs(forward, slots, [1, 4], Recorder(), adapted=True)
    assert len(seen) == 4
    for adapter, expected in ((2, [2, 2, 0, 0]), (0, None), (1, [1, 1, 0, 0])):
        hidden = graphs.hidden([row_of(1, [9], 2, [33, 34], adapter)])
        assert hidden is not None
        assert hidden.tolist() == [2, 3, 0, 0]
        found = seen[-1].adapters
        assert (None if found is None else found.tolist()) == expected


def test_steps_that_no_graph_serves(slots: DeviceSlots) -> None:
    graphs = DecodeGraphs(lambda batch: batch.positions, slots, [1, 2, 30], Recorder())
    table = list(range(8))
    assert graphs.hidden([row_of(0, table, 0, [1] * 17)]) is None
    assert graphs.hidden([row_of(number, table, 0, [1] * 16) for number in range(2)]) is None


@pytest.mark.parametrize("most", [1, 2, 7, 8, 63, 64, 100, 256])
def test_sizes_of_graphs(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < min(max(rows, 2), 16)
