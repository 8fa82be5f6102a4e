"""Matrix products with quantized weights on GPUs, in Triton (see `quantized`).

The inputs stay as they are. A tile of weights is read in its few bits and widened in registers:
scale * number + minimum in float32, which is exact but for the sum, then rounded to the type of the
inputs. So a product is the one with `Quantized.dequantized` in that type, as if the matrix had been
widened, of which a quarter or a half is read.

Matrices are packed once, in blocks of BLOCK inputs, so that a tile lies in one piece. What belongs
to an input of a block's first half shares a byte, or a word, with what belongs to one of its second
half: numbers of four bits, and the scales of groups.

Every element is a sum over the inputs, in order, as in `triton_matmul`; with `invariant` tiles of
one size a row's bits depend on nothing but the row. Without that, few rows have smaller tiles, and
parts of the inputs to programs of their own, whose sums are added up in order: a matrix of 4,096
outputs has 64 tiles, with which a chip cannot keep enough reads under way.

The weights are the left operand of the matrix units, which may come from registers, and may not
have fewer than 64 lines on some chips.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.quantized import GROUP, Quantized
from pagefleet_kernels.triton_jit import jit, jit_once_for
from pagefleet_kernels.triton_matmul import dot_type
from pagefleet_kernels.triton_tiling import Chip, chip_of

BLOCK = 128
"""Inputs whose numbers lie together."""

_FEW_ROWS, _ROWS = 16, 64
"""Of a tile."""

_PROGRAMS_PER_PROCESSOR = 4
_SUMMED = 1024
"""Elements of a program that adds up."""
_MOST_PARTS = 8
_LEAST_BLOCKS = 4
"""Of a part."""


@dataclass(frozen=True)
class PackedGroups:
    """A quantized matrix as the kernel reads it; what blocks have too much is zeros.

    numbers: uint8 [blocks, outputs, BLOCK * bits / 8].
    scales, minimums: pairs of float16 as int32 [blocks, outputs, BLOCK / GROUP / 2].
    """

    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None
    inputs: int

    @classmethod
    def of(cls, matrix: Quantized) -> Self:
        """Pack a matrix, where it is; floats are not multiplied here."""
        assert not matrix.floats
        numbers = _blocks(matrix.numbers, BLOCK)
        if matrix.minimums is not None:
            first, second = numbers.chunk(2, dim=-1)
            numbers = first | second << 4
        minimums = None if matrix.minimums is None else _pairs(matrix.minimums)
        return cls(numbers, _pairs(matrix.scales), minimums, matrix.shape[1])

    @property
    def bits(self) -> int:
        """Of a number."""
        return 8 if self.minimums is None else 4

    @property
    def nbytes(self) -> int:
        """What a product reads of it."""
        minimums = 0 if self.minimums is None else self.minimums.nbytes
        return self.numbers.nbytes + self.scales.nbytes + minimums


def _blocks(values: Tensor, width: int) -> Tensor:
    """[outputs, n] -> [n / width, outputs, width]"""
    padded = F.pad(values, (0, -values.shape[1] % width))
    return padded.view(len(values), -1, width).transpose(0, 1).contiguous()


def _pairs(factors: Tensor) -> Tensor:
    """Those of a block's halves beside each other."""
    blocks = _blocks(factors, BLOCK // GROUP)
    return torch.stack(blocks.chunk(2, dim=-1), dim=-1).view(torch.int32).squeeze(-1)


@jit
def _of_half(pairs: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """float16 in int32 -> float32"""
    return (
        ((pairs >> (16 * HALF)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    )


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
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BIASED: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """A program takes every so-manieth tile of `output` [parts, rows, outputs]."""
    HALF: tl.constexpr = BLOCK // 2
    GROUPS: tl.constexpr = HALF // GROUP
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, COLUMNS)
    blocks = tl.cdiv(inputs, BLOCK)
    for tile in range(tl.program_id(0), row_tiles * column_tiles * parts, tl.num_programs(0)):
        part = tile // row_tiles // column_tiles
        lines = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        columns = tile // row_tiles % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
        places, groups = tl.arange(0, HALF), tl.arange(0, GROUPS)
        lefts = values + lines.to(tl.int64)[None, :] * value_stride
        known = (columns < outputs)[:, None]
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        for block in range(blocks * part // parts, blocks * (part + 1) // parts):
            packed = (block * outputs + columns).to(tl.int64)[:, None]
            factors = packed * GROUPS + groups[None, :]
            scale_pairs = tl.load(scales + factors, mask=known, other=0)
            if BITS == 4:
                minimum_pairs = tl.load(minimums + factors, mask=known, other=0)
                pairs = tl.load(numbers + packed * HALF + places[None, :], mask=known, other=0)
            for half in tl.static_range(2):
                if BITS == 4:
                    wide = ((pairs >> (4 * half)) & 15).to(tl.float32)
                else:
                    begin = packed * BLOCK + half * HALF
                    codes = tl.load(numbers + begin + places[None, :], mask=known, other=0)
                    wide = codes.to(tl.float32) - 128.0
                wide = tl.reshape(wide, [COLUMNS, GROUPS, GROUP])
                wide *= _of_half(scale_pairs, half)[:, :, None]
                if BITS == 4:
                    wide += _of_half(minimum_pairs, half)[:, :, None]
                weights = tl.reshape(wide, [COLUMNS, HALF]).to(values.dtype.element_ty)
                depths = block * BLOCK + half * HALF + places[:, None]
                inside = (depths < inputs) & (lines < rows)[None, :]
                right = tl.load(lefts + depths, mask=inside, other=0.0).to(DOT_TYPE)
                sums = tl.dot(weights.to(DOT_TYPE), right, sums, input_precision="ieee")
        if BIASED:
            sums += tl.load(bias + columns, mask=columns < outputs, other=0.0)[:, None]
        targets = (part * rows + lines).to(tl.int64)[None, :] * outputs + columns[:, None]
        mask = known & (lines < rows)[None, :]
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
    matrix: PackedGroups,
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
        GROUP=GROUP,
        BITS=matrix.bits,
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
        self.matrix, self._bias, self._invariant = PackedGroups.of(matrix), bias, invariant
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
