"""What a GPU remembers of the slots, so that a step needs a few small copies from the host.

Every slot has its block table and the token that was sampled for it last on the device; a plan's
forks and table deltas are applied there in the order of the stream. A step's rows then travel as
one array of integers, and all tensors of the batch are made of it on the device. A row whose input
is the last sample gets it there: Python never learns it before the result is taken.

One more slot serves tokens that pad a batch to a size that a graph was captured for: its table
names a block of its own over and over, which nobody else reads.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet.wire import SAMPLED
from pagefleet_worker.interface import EngineFacts
from pagefleet_worker.paging.batch import Batch, pad_rows
from pagefleet_worker.paging.slots import Row, Step
from pagefleet_worker.paging.transfer import to_device


def pack_rows(
    rows: Sequence[Row], padding_slot: int = 0, size: int = 0, *, adapted: bool = False
) -> NDArray[np.int64]:
    """What `DeviceSlots.batch` needs to know of `rows`: slots [R], starts [R], offsets [R + 1], and
    of each token the slot [T], the position [T], the id [T], and if some are `adapted` the LoRA
    adapter [T].

    Less than `size` tokens are padded to so many, by rows of one token, and the rows to as many by
    empty ones.
    """
    counts = [len(row.tokens) for row in rows]
    padding = max(size - sum(counts), 0)
    counts += [1] * padding
    counts += [0] * (size - len(counts))
    added = len(counts) - len(rows)
    numbers = np.array([row.number for row in rows] + [padding_slot] * added)
    starts = np.array([row.start for row in rows] + [0] * added)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(owners)) + (starts - offsets[:-1])[owners]
    ids = np.concatenate([*(row.tokens for row in rows), np.zeros(padding, np.int64)])
    parts = [numbers, starts, offsets, numbers[owners], positions, ids]
    if adapted:
        parts.append(np.array([row.adapter for row in rows] + [0] * added)[owners])
    return np.concatenate(parts).astype(np.int64)


class DeviceSlots:
    """The block tables and last samples of `slots` slots, and those of the padding.

    Args:
        slots: how many there are; `padding` is the number of one more.
        width: blocks that a table may have.
        block_size: tokens a block holds.
        spare_block: the block of the padding.
        device: where they are.
    """

    def __init__(
        self, slots: int, width: int, block_size: int, spare_block: int, device: torch.device
    ) -> None:
        self.padding = slots
        self.block_size = block_size
        self.tables = torch.zeros(slots + 1, width, dtype=torch.int32, device=device)
        self.tables[slots] = spare_block
        self.sampled = torch.zeros(slots + 1, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, facts: EngineFacts, device: torch.device) -> Self:
        """For an engine whose pool has one block more than it says."""
        width = -(-facts.max_model_len // facts.block_size)
        return cls(facts.slots, width, facts.block_size, facts.blocks, device)

    def update(self, step: Step) -> None:
        """Apply the forks and the table deltas of a plan."""
        device = self.tables.device
        origins: dict[int, int] = {}
        for target, source in step.forked:
            origins[target] = origins.get(source, source)
        if origins:
            targets, sources = to_device([list(origins), list(origins.values())], device)
            self.tables.index_copy_(0, targets, self.tables.index_select(0, sources))
        width = self.tables.shape[1]
        entries = {(slot, at): block for slot, at, block in step.deltas if at < width}
        if entries:
            columns = [(*place, block) for place, block in entries.items()]
            slots, indices, blocks = to_device(columns, device, np.int64).unbind(1)
            self.tables.index_put_((slots, indices), blocks.to(torch.int32))

    def keep(self, numbers: Sequence[int], tokens: Tensor) -> None:
        """Remember `tokens` [n] as the last samples of the slots `numbers`, all different."""
        self.sampled.index_copy_(0, to_device(numbers, self.sampled.device, np.int64), tokens)

    def batch(self, packed: Tensor, rows: int, width: int, *, adapted: bool = False) -> Batch:
        """The batch of what `pack_rows` packed, int64 on the device; orders no copy.

        Args:
            packed: [3 * R + 1 + 3 * T], or 4 * T if it is adapted.
            rows: R.
            width: M, at least the blocks that the longest row has.
            adapted: whether it names adapters.
        """
        sizes = [rows, rows, rows + 1, len(packed) - 3 * rows - 1]
        numbers, starts, offsets, of_tokens = torch.split(packed, sizes)
        owners, positions, ids, *adapters = of_tokens.chunk(3 + adapted)
        blocks = self.tables[owners, positions // self.block_size]
        last = self.sampled[owners].clamp(min=0)
        return Batch(
            ids=pad_rows(torch.where(ids == SAMPLED, last, ids)),
            positions=positions,
            slots=torch.add(positions % self.block_size, blocks, alpha=self.block_size),
            tables=self.tables[:, :width].index_select(0, numbers),
            starts=starts.to(torch.int32),
            offsets=offsets.to(torch.int32),
            adapters=adapters[0].to(torch.int32) if adapted else None,
        )
