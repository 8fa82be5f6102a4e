"""Which tokens of a row: the largest, the k largest, or one drawn in proportion to its weight.

A row's answer is a function of that row alone, to the last bit, whatever rows stand beside it.
Two things see to it. Of equal values the lower id goes first, which `torch.topk` leaves open
(bfloat16 logits are often equal). And weights are integers, whose sums do not depend on the order
or the shape in which they are added, as sums of floats do.

A row is read in blocks: a reduction over all of it, then a search in one block. `torch.argmax`
and `cumsum` are not vectorized, `amax` and `sum` are (49,152 columns, 32 rows, 1 thread: argmax
1.3 ms, in blocks 0.16 ms).
"""

from collections.abc import Callable

import torch
from torch import Tensor

WEIGHT_ONE = 1 << 30
"""The weight of probability 1, so that the sum of a row's weights fits in an int32."""

_BLOCK = 256

_CACHED = 1 << 18
"""Values of which a CPU's caches hold a few copies."""

_WITHIN_REACH = 1 << 24
"""Values of which a GPU holds a few copies, of 8 bytes each, beside the pool."""


def chunk_rows(values: Tensor) -> int:
    """How many rows of [n, V] to work on at a time.

    On a CPU more would not fit its caches, and their pages would be mapped anew each time (32 rows
    of 49,152: three times as slow); on a GPU they might not fit its memory, and each part begins at
    a multiple of 16 bytes, as kernels were compiled for.
    """
    if values.is_cuda:
        return max(4, _WITHIN_REACH // values.shape[-1] // 4 * 4)
    return max(1, _CACHED // values.shape[-1])


def largest(values: Tensor) -> Tensor:
    """The id of each row's largest value, the lowest id of equal ones: [n, V] -> [n] int64.

    NaN counts as the largest.
    """
    block = _by_block(values, lambda part: part.amax(-1)).argmax(-1, keepdim=True)
    ids = _ids_of(block, values)
    return ids.gather(-1, values.gather(-1, ids).argmax(-1, keepdim=True)).squeeze(-1)


def top(values: Tensor, count: int) -> Tensor:
    """The ids of each row's `count` largest values, largest first, the lower id first of equal
    ones: [n, V] float32 -> [n, count] int64.
    """
    bits = (values + 0.0).view(torch.int32)  # adding makes -0.0 equal to 0.0
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)  # integers in the order of the floats
    last = values.shape[-1] - 1
    keys = ordered.to(torch.int64) << 32 | torch.arange(last, -1, -1, device=values.device)
    return last - (keys.topk(count).values & 0xFFFFFFFF)


def weights_of(scores: Tensor) -> Tensor:
    """Softmax of [n, V] float32 in fixed point: int32, in units of 1 / `WEIGHT_ONE`."""
    return (scores.softmax(-1) * WEIGHT_ONE).round_().to(torch.int32)


def inverse_transform(weights: Tensor, bits: Tensor) -> Tensor:
    """Each row's first id whose cumulative weight, in the order of ids, exceeds u times the sum.

    weights [n, V] int32; u = bits / 2**24, bits [n] int64 -> ids [n] int64.

    The order of ids needs no sort (49,152 columns: 0.06 ms a row; the descending order 0.2 ms
    where 1,024 tokens are enough, 3.4 ms where they are not). A row must have a positive weight.
    """
    sums = _by_block(weights, lambda part: part.sum(-1, dtype=torch.int32)).to(torch.int64)
    ends = sums.cumsum(-1)
    target = bits.unsqueeze(-1) * ends[:, -1:] >> 24
    block = (ends <= target).sum(-1, keepdim=True).clamp_(max=ends.shape[-1] - 1)
    ids = _ids_of(block, weights)
    before = (ends - sums).gather(-1, block)
    within = weights.gather(-1, ids).cumsum(-1, dtype=torch.int64) + before
    index = (within <= target).sum(-1, keepdim=True).clamp_(max=_BLOCK - 1)
    return ids.gather(-1, index).squeeze(-1)


def _by_block(values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce each row block by block, the last of which may be short: [n, V] -> [n, blocks]."""
    size = values.shape[-1]
    whole = size - size % _BLOCK
    reduced = reduce(values[:, :whole].view(len(values), whole // _BLOCK, _BLOCK))
    if whole == size:
        return reduced
    return torch.cat((reduced, reduce(values[:, whole:]).unsqueeze(-1)), -1)


def _ids_of(block: Tensor, values: Tensor) -> Tensor:
    """The ids in one block of each row, [n, 1] -> [n, `_BLOCK`]; the last stands for any beyond."""
    ids = block * _BLOCK + torch.arange(_BLOCK, device=block.device)
    return ids.clamp_(max=values.shape[-1] - 1)
