"""Matrix products whose rows do not depend on each other's number, on GPUs, in Triton.

A library chooses its tiles, and how it splits the sums, by the number of rows; so a token's bits
change with its batch. Here every element is one sum over the inputs, in order, in tiles whose sizes
depend on the weights' shape alone ("Defeating nondeterminism in LLM inference", He, 2025). As many
programs as the chip has processors walk over the tiles, those of the same weights one after
another, so that weights are read from memory once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.triton_jit import INTERPRETED, jit_once_for
from pagefleet_kernels.triton_tiling import Chip, chip_of

_ROWS = 64
_DEPTH_BYTES = 128
_LEAST_TILES = 128
"""Along the outputs: narrower tiles for few outputs, so that one tile of rows fills a chip."""


@jit_once_for("rows")
def _product_kernel(
    values: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    value_stride: tl.tensor,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """A program takes every so-manieth tile of `output` [rows, outputs]."""
    row_tiles = tl.cdiv(rows, ROWS)
    tiles = row_tiles * tl.cdiv(outputs, COLUMNS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        lines = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        columns = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
        depths = tl.arange(0, DEPTH)
        left = values + lines.to(tl.int64)[:, None] * value_stride + depths[None, :]
        right = weight + columns.to(tl.int64)[None, :] * INPUTS + depths[:, None]
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, INPUTS, DEPTH):
            inside = begin + depths < INPUTS
            row_mask = (lines < rows)[:, None] & inside[None, :]
            column_mask = (columns < outputs)[None, :] & inside[:, None]
            part = tl.load(left + begin, mask=row_mask, other=0.0).to(DOT_TYPE)
            weights = tl.load(right + begin, mask=column_mask, other=0.0).to(DOT_TYPE)
            sums = tl.dot(part, weights, sums, input_precision="ieee")
        if BIASED:
            sums += tl.load(bias + columns, mask=columns < outputs, other=0.0)[None, :]
        places = lines.to(tl.int64)[:, None] * outputs + columns[None, :]
        mask = (lines < rows)[:, None] & (columns < outputs)[None, :]
        tl.store(output + places, sums.to(output.dtype.element_ty), mask=mask)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type of the operands. (The interpreter's products are wrong in bfloat16.)"""
    if dtype is torch.float16:
        return tl.float16
    return tl.bfloat16 if dtype is torch.bfloat16 and not INTERPRETED else tl.float32


def product(
    values: Tensor, weight: Tensor, bias: Tensor | None = None, *, chip: Chip | None = None
) -> Tensor:
    """values weight^T + bias, as `torch.nn.functional.linear`; a row has the same bits whatever
    rows stand beside it.

    Args:
        values: [T, inputs], rows contiguous.
        weight: [outputs, inputs], contiguous, of the same type.
        bias: [outputs].
        chip: what to launch for, instead of the chip of `values`.

    Returns:
        [T, outputs] in the type of `values`, of sums in float32.
    """
    rows, inputs = values.shape
    outputs = len(weight)
    output = values.new_empty(rows, outputs)
    columns = 128
    while columns > 32 and outputs < columns * _LEAST_TILES:
        columns //= 2
    chip = chip or chip_of(values.device)
    tiles = triton.cdiv(rows, _ROWS) * triton.cdiv(outputs, columns)
    if rows:
        _product_kernel[(min(tiles, 2 * chip.processors),)](
            values,
            weight,
            weight if bias is None else bias,
            output,
            rows,
            outputs,
            values.stride(0),
            INPUTS=inputs,
            ROWS=_ROWS,
            COLUMNS=columns,
            DEPTH=_DEPTH_BYTES // values.element_size(),
            BIASED=bias is not None,
            DOT_TYPE=dot_type(values.dtype),
            num_warps=4,
            num_stages=min(4, chip.stages),
            enable_fp_fusion=False,
        )
    return output
