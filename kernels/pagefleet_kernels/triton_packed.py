"""Matrices of few bits on GPUs: how they lie in memory, and how Triton's kernels widen them.

A tile of weights is read in its few bits and widened in registers: scale * number + minimum in
float32, which is exact but for the sum, or for the product with an e4m3, whose scale has all of a
float32's bits; then it is rounded to the type of what it is multiplied with. So a product is the
one with `Quantized.dequantized` in that type, as if the matrix had been widened, of which a quarter
or a half is read.

Matrices are packed once, in blocks of BLOCK inputs, so that what a tile has of a block lies in one
piece. What belongs to an input of a block's first half shares a byte, or a word, with what belongs
to one of its second half: numbers of four bits a byte, numbers of eight bits and the scales of
groups a word. So a block is read once and multiplied in two halves, and nothing moves between
threads.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.quantized import E4M3_GROUP, GROUP, Kind, Quantized
from pagefleet_kernels.triton_fp8 import decode
from pagefleet_kernels.triton_jit import jit

BLOCK = E4M3_GROUP
"""Inputs whose numbers lie together."""

_HALF = tl.constexpr(BLOCK // 2)
_GROUP = tl.constexpr(GROUP)
_INT4, _INT8, _E2M1, _E4M3 = (
    tl.constexpr(kind.value) for kind in (Kind.INT4, Kind.INT8, Kind.E2M1, Kind.E4M3)
)


@dataclass(frozen=True)
class PackedMatrix:
    """A quantized matrix as the kernels read it; what blocks have too much is zeros.

    numbers: pairs [blocks, outputs, BLOCK / 2], uint8 of four bits, int16 of eight.
    scales, minimums: pairs of float16 as int32 [blocks, outputs, BLOCK / GROUP / 2]; of e4m3
        float32 [blocks, outputs], since a block is a group.
    """

    kind: Kind
    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None
    inputs: int

    @classmethod
    def of(cls, matrix: Quantized) -> Self:
        """Pack a matrix, where it is."""
        if matrix.bits == 4:
            first, second = _halves(matrix.numbers, BLOCK)
            numbers = (first | second << 4).transpose(0, 1).contiguous()
        else:
            numbers = _pairs(matrix.numbers.view(torch.uint8), BLOCK, torch.int16)
        if matrix.kind is Kind.E4M3:
            scales = matrix.scales.T.contiguous()
            return cls(matrix.kind, numbers, scales, None, matrix.shape[1])
        minimums = None if matrix.minimums is None else _factors(matrix.minimums)
        return cls(matrix.kind, numbers, _factors(matrix.scales), minimums, matrix.shape[1])

    @property
    def nbytes(self) -> int:
        """What a product reads of it."""
        minimums = 0 if self.minimums is None else self.minimums.nbytes
        return self.numbers.nbytes + self.scales.nbytes + minimums


def _halves(values: Tensor, width: int) -> tuple[Tensor, ...]:
    """Those of blocks of so many: [outputs, n] -> twice [outputs, n / width, width / 2]."""
    padded = F.pad(values, (0, -values.shape[1] % width))
    return padded.view(len(values), -1, 2, width // 2).unbind(2)


def _pairs(values: Tensor, width: int, word: torch.dtype) -> Tensor:
    """Values of a block's halves beside each other, as words: [n / width, outputs, width / 2]."""
    words = torch.stack(_halves(values, width), dim=-1).view(word).squeeze(-1)
    return words.transpose(0, 1).contiguous()


def _factors(values: Tensor) -> Tensor:
    """Those of groups, float16 [outputs, groups], in pairs."""
    return _pairs(values, BLOCK // GROUP, torch.int32)


@jit
def load_block(
    numbers: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    lines: tl.tensor,
    known: tl.tensor,
    KIND: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What some lines of a packed matrix hold of a block, for `widened`.

    Args:
        lines: int64 [N], block * outputs + output.
        known: whether each is there; the others are zeros.
    """
    GROUPS: tl.constexpr = _HALF // _GROUP
    places, groups = tl.arange(0, _HALF), tl.arange(0, GROUPS)
    mask = known[:, None]
    pairs = tl.load(numbers + lines[:, None] * _HALF + places[None, :], mask=mask, other=0)
    factors = lines[:, None] * GROUPS + groups[None, :]
    if KIND == _E4M3:
        scale = tl.load(scales + lines, mask=known, other=0.0)
    else:
        scale = tl.load(scales + factors, mask=mask, other=0)
    minimum = scale
    if KIND == _INT4:
        minimum = tl.load(minimums + factors, mask=mask, other=0)
    return pairs, scale, minimum


@jit
def widened(
    pairs: tl.tensor,
    scale: tl.tensor,
    minimum: tl.tensor,
    PART: tl.constexpr,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """The weights of half PART of what `load_block` gave: [N, BLOCK / 2] of that type. NATIVE: as
    in `triton_fp8`.
    """
    GROUPS: tl.constexpr = _HALF // _GROUP
    if KIND == _INT8:
        wide = ((pairs >> (8 * PART)) & 255).to(tl.float32) - 128.0
    elif KIND == _INT4:
        wide = ((pairs >> (4 * PART)) & 15).to(tl.float32)
    elif KIND == _E2M1:
        wide = _e2m1_halves((pairs >> (4 * PART)) & 15)
    else:
        wide = decode(((pairs >> (8 * PART)) & 255).to(tl.uint8), tl.float32, NATIVE)
    if KIND == _E4M3:
        wide *= scale[:, None]
    else:
        wide = tl.reshape(wide, [pairs.shape[0], GROUPS, _GROUP])
        wide *= _of_half(scale, PART)[:, :, None]
        if KIND == _INT4:
            wide += _of_half(minimum, PART)[:, :, None]
        wide = tl.reshape(wide, [pairs.shape[0], _HALF])
    return wide.to(TYPE)


@jit
def _e2m1_halves(codes: tl.tensor) -> tl.tensor:
    """`quantized.e2m1_halves`: shifted to where a float16 has its exponent and fraction, an e2m1 is
    a float16 of 2 ** -14 times the value, 0.5 included, which is a subnormal number of both.
    """
    wide = codes.to(tl.int16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 32768.0


@jit
def _of_half(pairs: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    """float16 in int32 -> float32"""
    own = (pairs >> (16 * PART)) & 0xFFFF
    return own.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
