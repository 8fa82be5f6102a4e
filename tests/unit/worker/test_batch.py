import random
from array import array

import torch

from pagefleet.params import SamplingParams
from pagefleet_worker.paging.batch import ROW_MULTIPLE, Batch, pad_rows
from pagefleet_worker.paging.slots import Row, Slot

CPU = torch.device("cpu")


def random_rows(generator: random.Random, block_size: int) -> list[Row]:
    """Rows anywhere in sequences whose tables may reach further than the step."""
    blocks = list(range(12 * 151))  # as many as all rows may have
    generator.shuffle(blocks)
    rows = []
    for number in range(generator.randint(1, 12)):
        start = generator.choice([0, generator.randrange(100)])
        tokens = array("i", [generator.randrange(5000) for _ in range(generator.randint(1, 50))])
        slot = Slot(SamplingParams(max_tokens=1, seed=0), 1, array("i"), [0], b"")
        used = -(-(start + len(tokens)) // block_size)
        slot.table.extend(blocks.pop() for _ in range(used + generator.randrange(3)))
        rows.append(Row(number, slot, start, tokens, 1))
    return rows


def test_every_token_finds_its_place() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for _ in range(100):
        block_size = generator.choice([1, 4, 16])
        rows = random_rows(generator, block_size)
        batch = Batch.of(rows, block_size, CPU)
        offsets = batch.offsets.tolist()
        total = offsets[-1]
        assert len(batch.ids) == -(-total // ROW_MULTIPLE) * ROW_MULTIPLE
        assert len(batch.positions) == len(batch.slots) == total
        assert not batch.ids[total:].any()
        assert batch.starts.tolist() == [row.start for row in rows]
        for index, row in enumerate(rows):
            assert offsets[index + 1] - offsets[index] == len(row.tokens)
            table = batch.tables[index].tolist()
            for step, token in enumerate(row.tokens):
                at, position = offsets[index] + step, row.start + step
                block, within = divmod(position, block_size)
                assert batch.ids[at] == token
                assert batch.positions[at] == position
                assert batch.slots[at] == row.slot.table[block] * block_size + within
            used = -(-row.end // block_size)
            assert table[:used] == row.slot.table[:used].tolist()
            assert not any(table[used:])


def test_types_are_those_of_the_kernels() -> None:
    batch = Batch.of(random_rows(random.Random(1), 16), 16, CPU)
    assert batch.ids.dtype == batch.positions.dtype == batch.slots.dtype == torch.int64
    assert batch.tables.dtype == batch.starts.dtype == batch.offsets.dtype == torch.int32


def test_padding_is_the_least_there_can_be() -> None:
    for length in range(1, 10):
        padded = pad_rows(torch.ones(length, 3))
        assert len(padded) % ROW_MULTIPLE == 0
        assert 0 <= len(padded) - length < ROW_MULTIPLE
        assert padded.sum() == 3 * length
