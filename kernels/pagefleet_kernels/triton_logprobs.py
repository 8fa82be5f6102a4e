"""Log-softmax on GPUs, in Triton, in an order of sums that depends on the vocabulary's size alone.

A program takes one row, in tiles, twice: for the maximum and the sum, kept lane by lane as an
online softmax (Milakov and Gimelshein, arXiv 1805.02867), then for the result.
"""

import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.triton_jit import jit

_TILE = 2048


@jit
def _log_softmax_kernel(
    logits: tl.tensor,
    output: tl.tensor,
    row_stride: tl.tensor,
    vocabulary: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * row_stride
    tops = tl.full([TILE], float("-inf"), tl.float32)
    masses = tl.zeros([TILE], tl.float32)
    for begin in range(0, vocabulary, TILE):
        ids = begin + tl.arange(0, TILE)
        values = tl.load(source + ids, mask=ids < vocabulary, other=float("-inf"))
        merged = tl.maximum(tops, values)
        shift = tl.where(merged == float("-inf"), 0.0, merged)
        masses = masses * tl.exp(tops - shift) + tl.exp(values - shift)
        tops = merged
    top = tl.max(tops, 0)
    mass = tl.sum(masses * tl.exp(tops - top))
    for begin in range(0, vocabulary, TILE):
        ids = begin + tl.arange(0, TILE)
        values = tl.load(source + ids, mask=ids < vocabulary, other=0.0)
        result = values - top - tl.log(mass)
        tl.store(output + row * vocabulary + ids, result, mask=ids < vocabulary)


def log_softmax(logits: Tensor) -> Tensor:
    """The logarithm of the softmax of each row: float32 [n, V] -> float32 [n, V].

    A row that holds NaN gives NaN.
    """
    output = logits.new_empty(logits.shape)
    if logits.numel():
        _log_softmax_kernel[(len(logits),)](
            logits,
            output,
            logits.stride(0),
            logits.shape[1],
            TILE=min(_TILE, triton.next_power_of_2(logits.shape[1])),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return output
