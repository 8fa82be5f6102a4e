"""Matrix products with quantized weights on GPUs, in Triton (see `quantized`).

The inputs stay as they are; weights are widened as they are read (`triton_packed`).

Every element is a sum over the inputs, in order, as in `triton_matmul`; with `invariant` tiles of
one size a row's bits depend on nothing but the row. Without that, few rows have smaller tiles, and
parts of the inputs to programs of their own, whose sums are added up in order: a matrix of 4,096
outputs has 64 tiles, with which a chip cannot keep enough reads under way.

The weights are the left operand of the matrix units, which may come from registers, and may not
have fewer than 64 lines on some chips.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.quantized import Quantized
from pagefleet_kernels.triton_jit import jit_once_for
from pagefleet_kernels.triton_matmul import dot_type
from pagefleet_kernels.triton_packed import BLOCK, PackedMatrix, load_block, widened
from pagefleet_kernels.triton_tiling import Chip, chip_of

_FEW_ROWS, _ROWS = 16, 64
"""Of a tile."""

_PROGRAMS_PER_PROCESSOR = 4
_SUMMED = 1024
"""Elements of a program that adds up."""
_MOST_PARTS = 8
_LEAST_BLOCKS = 4
"""Of a part."""


@jit_once_for("rows", "parts")
def _quantized_product_kernel(
    values: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    parts: tl.tensor,
    value_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
    BIASED: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """A program takes every so-manieth tile of `output` [parts, rows, outputs]."""
    TYPE: tl.constexpr = values.dtype.element_ty
    HALF: tl.constexpr = BLOCK // 2
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, COLUMNS)
    blocks = tl.cdiv(inputs, BLOCK)
    for tile in range(tl.program_id(0), row_tiles * column_tiles * parts, tl.num_programs(0)):
        part = tile // row_tiles // column_tiles
        lines = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        columns = tile // row_tiles % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
        places = tl.arange(0, HALF)
        lefts = values + lines.to(tl.int64)[None, :] * value_stride
        known = columns < outputs
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        for block in range(blocks * part // parts, blocks * (part + 1) // parts):
            packed = (block * outputs + columns).to(tl.int64)
            pairs, scale, minimum = load_block(numbers, scales, minimums, packed, known, KIND)
            for half in tl.static_range(2):
                weights = widened(pairs, scale, minimum, half, KIND, TYPE, NATIVE)
                depths = block * BLOCK + half * HALF + places[:, None]
                inside = (depths < inputs) & (lines < rows)[None, :]
                right = tl.load(lefts + depths, mask=inside, other=0.0).to(DOT_TYPE)
                sums = tl.dot(weights.to(DOT_TYPE), right, sums, input_precision="ieee")
        if BIASED:
            sums += tl.load(bias + columns, mask=known, other=0.0)[:, None]
        targets = (part * rows + lines).to(tl.int64)[None, :] * outputs + columns[:, None]
        mask = known[:, None] & (lines < rows)[None, :]
        tl.store(output + targets, sums.to(output.dtype.element_ty), mask=mask)


@jit_once_for("size", "parts")
def _sum_kernel(
    partial: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    size: tl.tensor,
    outputs: tl.tensor,
    parts: tl.tensor,
    SIZE: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """Add up [parts, size], in order, and a bias for each of so many outputs."""
    places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = places < size
    sums = tl.load(partial + places, mask=inside, other=0.0)
    for part in range(1, parts):
        sums += tl.load(partial + part * size + places, mask=inside, other=0.0)
    if BIASED:
        sums += tl.load(bias + places % outputs, mask=inside, other=0.0)
    tl.store(output + places, sums.to(output.dtype.element_ty), mask=inside)


def quantized_product(
    values: Tensor,
    matrix: PackedMatrix,
    bias: Tensor | None = None,
    *,
    invariant: bool = False,
    chip: Chip | None = None,
) -> Tensor:
    """values weight^T + bias, of weights that are rounded to the type of `values`.

    Args:
        values: [T, inputs], rows contiguous.
        matrix: [outputs, inputs].
        bias: [outputs], of the type of `values`.
        invariant: whether a row has the same bits whatever rows stand beside it.
        chip: what to launch for, instead of the chip of `values`.

    Returns:
        [T, outputs] in the type of `values`, of sums in float32.
    """
    rows, (blocks, outputs) = len(values), matrix.numbers.shape[:2]
    output = values.new_empty(rows, outputs)
    if not rows:
        return output
    chip = chip or chip_of(values.device)
    columns = 64 if values.element_size() == 2 else 32
    tiles, wanted = triton.cdiv(outputs, columns), _PROGRAMS_PER_PROCESSOR * chip.processors
    parts = 1
    if rows <= _ROWS and not invariant:
        parts = max(1, min(triton.cdiv(wanted, tiles), _MOST_PARTS, blocks // _LEAST_BLOCKS))
    height = _ROWS if invariant or rows > _FEW_ROWS else _FEW_ROWS
    split = parts > 1
    target = values.new_empty(parts, rows, outputs, dtype=torch.float32) if split else output
    _quantized_product_kernel[(min(tiles * triton.cdiv(rows, height) * parts, wanted),)](
        values,
        matrix.numbers,
        matrix.scales,
        matrix.scales if matrix.minimums is None else matrix.minimums,
        values if bias is None else bias,
        target,
        rows,
        matrix.inputs,
        outputs,
        parts,
        values.stride(0),
        ROWS=height,
        COLUMNS=columns,
        BLOCK=BLOCK,
        KIND=matrix.kind.value,
        NATIVE=chip.converts_fp8,
        BIASED=bias is not None and not split,
        DOT_TYPE=dot_type(values.dtype),
        num_warps=4,
        num_stages=min(4, chip.stages),
    )
    if split:
        _sum_kernel[(triton.cdiv(output.numel(), _SUMMED),)](
            target,
            values if bias is None else bias,
            output,
            output.numel(),
            outputs,
            parts,
            SIZE=_SUMMED,
            BIASED=bias is not None,
        )
    return output


class QuantizedLinear:
    """y = x W^T + b over a matrix that is packed once."""

    def __init__(self, matrix: Quantized, bias: Tensor | None, *, invariant: bool) -> None:
        self.matrix, self._bias, self._invariant = PackedMatrix.of(matrix), bias, invariant
        self._ready = False

    def __call__(self, values: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, inputs] -> [T, outputs]. The first call compiles for other numbers of rows too, so
        that no later one waits for that.
        """
        if not self._ready:
            self._ready = True
            for rows in (1, _FEW_ROWS + 1, _ROWS + 1):
                self(values.new_zeros(rows, values.shape[1]))
        return quantized_product(values, self.matrix, self._bias, invariant=self._invariant)
