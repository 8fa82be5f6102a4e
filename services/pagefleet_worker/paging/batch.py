"""From a step's rows to the tensors of a forward pass.

Whatever is per token is done by numpy over the whole step; Python loops over rows only. A block
table is short beside the context it stands for, so tables are gathered anew every step.

On a CPU in float32, a row of torch's matrix products has the same bits in every batch whose number
of rows is a multiple of 4, and other bits in the remainder of another. So batches are padded to
that; our own products need no padding and leave it out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_worker.paging.slots import Row

ROW_MULTIPLE = 4
"""Matrix products get a multiple of so many rows."""


@dataclass(frozen=True)
class Batch:
    """A step's rows on the device; the alphabet is that of `pagefleet_kernels`.

    ids: int64 [P], the tokens, padded; P is T rounded up to `ROW_MULTIPLE`.
    positions: int64 [T], in their sequences.
    slots: int64 [T], where each token's keys and values go: physical block * S + slot within.
    tables: int32 [R, M]; what a table lacks to the longest is 0.
    starts: int32 [R], the position of each row's first token.
    offsets: int32 [R + 1], where each row's tokens begin and end.
    adapters: int32 [T], the LoRA adapter of each token's row, 0 for none; None if no row has one.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    starts: Tensor
    offsets: Tensor
    adapters: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[Row], block_size: int, device: torch.device) -> "Batch":
        """Lay out `rows`, of which there is at least one.

        An input that is `SAMPLED` still was to come of a row that failed: some token does, because
        nobody waits for what follows.
        """
        counts = np.array([len(row.tokens) for row in rows])
        starts = np.array([row.start for row in rows])
        offsets = np.concatenate(([0], np.cumsum(counts)))
        total = int(offsets[-1])
        owners = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(total) + (starts - offsets[:-1])[owners]
        tables = _tables(rows, block_size)
        slots = tables[owners, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        ids = np.concatenate([row.tokens for row in rows])
        adapters = np.array([row.adapter for row in rows])

        def on_device(values: NDArray[np.integer], dtype: type) -> Tensor:
            return torch.from_numpy(values.astype(dtype)).to(device, non_blocking=True)

        return cls(
            ids=pad_rows(on_device(np.maximum(ids, 0), np.int64)),
            positions=on_device(positions, np.int64),
            slots=on_device(slots, np.int64),
            tables=on_device(tables, np.int32),
            starts=on_device(starts, np.int32),
            offsets=on_device(offsets, np.int32),
            adapters=on_device(adapters[owners], np.int32) if adapters.any() else None,
        )


def pad_rows(values: Tensor) -> Tensor:
    """Append zeros to the first dimension until it is a multiple of `ROW_MULTIPLE`."""
    missing = -len(values) % ROW_MULTIPLE
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, missing)) if missing else values


def _tables(rows: Sequence[Row], block_size: int) -> NDArray[np.int32]:
    """The part of each row's block table that this step reads or writes."""
    lengths = [-(-row.end // block_size) for row in rows]
    tables = np.zeros((len(rows), max(lengths)), np.int32)
    for table, row, length in zip(tables, rows, lengths, strict=True):
        table[:length] = row.slot.table[:length]
    return tables
