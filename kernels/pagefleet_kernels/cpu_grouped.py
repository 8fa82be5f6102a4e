"""The inner loop of products with quantized matrices (see `quantized`) on the CPU.

It goes through a panel as `cpu_gemm` does, but group by group. Within a group four inputs at a time
are multiplied in integers (`cpu_bytes`); these sums are exact. Then the group's sum is scaled and
added to a float32, so that an output is one chain of multiply-adds in the order of the groups,
whatever stands beside it.

A quantized row is a row of blocks, one for each group: its scale (float32), the sum of its numbers
(int32), its numbers (int8). The sum is there because VPDPBUSD wants weights without a sign: what
they are too large by is taken off at the start. Floats of four bits are looked up in a table of
sixteen bytes, in registers (VPSHUFB).
"""

import enum
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pagefleet_kernels.cpu_bytes import (
    ADDS_PAIRS,
    BYTES,
    SHORTS,
    add_neighbours,
    constant_bytes,
    look_up,
    multiply_add_bytes,
    pairs,
    sizes_and_signed,
)
from pagefleet_kernels.cpu_formats import read
from pagefleet_kernels.cpu_ir import (
    FLOAT,
    HALVES,
    INT,
    INTS,
    LANES,
    VECTOR,
    Format,
    at,
    attribute_in_kernels,
    call,
    constant_in_kernels,
    floats,
    fold,
    intrinsic,
    ints,
    load,
    passes,
    splat,
    store,
    widen_float16,
)
from pagefleet_kernels.quantized import E2M1_HALVES, GROUP, Matrix, Quantized

_INT64 = ir.IntType(64)
_VECTOR_BYTES = LANES * 4
_STEP = 4
"""Inputs that are multiplied at a time."""

_SMALLEST = 1.1754943508222875e-38
"""The smallest normal float32: numbers of a group whose scale is below it count as 0."""

BLOCK_BYTES = 8 + GROUP
"""Size of a group of a quantized row."""


def blocks_size(size: int) -> int:
    """Bytes of a row of so many numbers, of which whole groups are quantized."""
    return size // GROUP * BLOCK_BYTES


class Weights(enum.Enum):
    """How the numbers of a packed matrix lie in memory."""

    PLAIN = "plain"
    """In the type of the values."""
    INT8 = "int8"
    INT4 = "int4"
    FLOAT4 = "float4"

    @classmethod
    def of(cls, matrix: Matrix) -> "Weights":
        """Those of a matrix."""
        if not isinstance(matrix, Quantized):
            return cls.PLAIN
        if matrix.floats:
            return cls.FLOAT4
        return cls.INT8 if matrix.bits == 8 else cls.INT4

    @property
    def grouped(self) -> bool:
        """Whether they are quantized in groups."""
        return self is not Weights.PLAIN

    @property
    def bits(self) -> int:
        """Of a number that is quantized."""
        return 8 if self is Weights.INT8 else 4

    @property
    def added(self) -> int:
        """What makes numbers too large, so that they need no sign."""
        if ADDS_PAIRS:
            return 0
        return {Weights.INT8: 128, Weights.FLOAT4: -min(E2M1_HALVES)}.get(self, 0)

    @property
    def in_shorts(self) -> bool:
        """Whether a group is summed up in 16 bits: of a lane's 16 products none has more than 15 *
        127 in size.
        """
        return ADDS_PAIRS and self.bits == 4


constant_in_kernels(Weights)
attribute_in_kernels("grouped")


def _multiplied(builder: Any, weights: Weights, column: Any, values: Any, total: Any) -> Any:
    """total + the products of the four bytes of each lane; `column` has those of the weights."""
    if not ADDS_PAIRS:
        return multiply_add_bytes(builder, column, values, total)
    left, right = (builder.bitcast(each, BYTES) for each in (column, values))
    if weights is Weights.INT8:
        left = builder.xor(left, constant_bytes([0x80] * BYTES.count))
    if weights is not Weights.INT4:
        left, right = sizes_and_signed(builder, left, right)
    sums = pairs(builder, left, right)
    return builder.add(total, sums if weights.in_shorts else add_neighbours(builder, sums))


def _half_floats(builder: Any, address: Any) -> Any:
    return widen_float16(builder, load(builder, address, HALVES))


def _unpacked(builder: Any, weights: Weights, words: Any) -> list[Any]:
    """The vectors of bytes that one vector of a panel holds, for steps that follow each other."""
    if weights is Weights.INT8:
        return [words]
    nibbles = ints(0x0F0F0F0F)
    parts = [builder.and_(words, nibbles), builder.and_(builder.lshr(words, ints(4)), nibbles)]
    return [_looked_up(builder, each) for each in parts] if weights is Weights.FLOAT4 else parts


def _looked_up(builder: Any, nibbles: Any) -> Any:
    """The numbers of floats of four bits, a byte each, with what is added to them."""
    table = [each + Weights.FLOAT4.added for each in E2M1_HALVES]
    return builder.bitcast(look_up(builder, table, builder.bitcast(nibbles, BYTES)), INTS)


def _emit_group(
    builder: Any, weights: Weights, sources: list[Any], numbers: Any, vectors: int
) -> list[Any]:
    """The exact sums of one group: int32 vectors for each row, and in it for each vector.

    A loop of few instructions, which LLVM unrolls where all sums stay in registers.
    """
    starts = []
    for source in sources:
        start = ir.Constant(SHORTS if weights.in_shorts else INTS, None)
        if weights.added:
            sum_ = load(builder, at(builder, source, 4), INT)
            start = splat(builder, builder.mul(sum_, INT(-weights.added)))
        starts += [start] * vectors
    before = builder.block
    body, after = builder.append_basic_block("inputs"), builder.append_basic_block("summed")
    builder.branch(body)
    builder.position_at_end(body)
    step = builder.phi(_INT64)
    totals = [builder.phi(start.type) for start in starts]
    place = builder.add(numbers, builder.mul(step, _INT64(vectors * _VECTOR_BYTES)))
    columns = [
        _unpacked(builder, weights, load(builder, at(builder, place, v * _VECTOR_BYTES), INTS))
        for v in range(vectors)
    ]
    inputs = _STEP * 8 // weights.bits
    skipped = builder.add(builder.mul(step, _INT64(inputs)), _INT64(8))
    grown = list(totals)
    for part in range(inputs // _STEP):
        for row, source in enumerate(sources):
            word = load(builder, at(builder, builder.add(source, skipped), part * _STEP), INT)
            spread = splat(builder, word)
            for vector, column in enumerate(columns):
                index = row * vectors + vector
                grown[index] = _multiplied(builder, weights, column[part], spread, grown[index])
    following = builder.add(step, _INT64(1))
    step.add_incoming(_INT64(0), before)
    step.add_incoming(following, body)
    for total, start, sum_ in zip(totals, starts, grown, strict=True):
        total.add_incoming(start, before)
        total.add_incoming(sum_, body)
    builder.cbranch(builder.icmp_signed("<", following, _INT64(GROUP // inputs)), body, after)
    builder.position_at_end(after)
    return [add_neighbours(builder, each) for each in grown] if weights.in_shorts else grown


def _emit_scaled(
    builder: Any,
    weights: Weights,
    sources: list[Any],
    totals: list[Any],
    factors: list[Any],
    sums: Any,
) -> None:
    """Adds the sums of one group, scaled, to the float32 at `sums`; `factors` are the scales of the
    vectors, then their minimums if there are any.
    """
    vectors = len(totals) // len(sources)
    for row, source in enumerate(sources):
        scale, minimums = load(builder, source, FLOAT), None
        if weights is Weights.INT4:
            sum_ = builder.sitofp(load(builder, at(builder, source, 4), INT), FLOAT)
            minimums = splat(builder, builder.fmul(scale, sum_))
        spread = splat(builder, scale)
        for vector in range(vectors):
            index = row * vectors + vector
            target = at(builder, sums, index * _VECTOR_BYTES)
            total = builder.sitofp(totals[index], VECTOR)
            factor = builder.fmul(factors[vector], spread)
            grown = call(builder, "fma", total, factor, load(builder, target))
            if minimums is not None:
                grown = call(builder, "fma", factors[vectors + vector], minimums, grown)
            store(builder, grown, target)


def emit_grouped_product(
    builder: Any,
    weights: Weights,
    vectors: int,
    rows: list[Any],
    panel: Any,
    groups: Any,
    sums: Any,
) -> None:
    """The loop over groups for rows at some addresses; `groups` is at least 1.

    A panel holds for each group the scales of its outputs, the minimums if there are any, then its
    numbers: of every output four inputs at a time.
    """
    for number in range(len(rows) * vectors):
        store(builder, floats(0.0), at(builder, sums, number * _VECTOR_BYTES))
    outputs = vectors * LANES
    head = outputs * (4 if weights is Weights.INT4 else 2)
    group_bytes = head + outputs * GROUP * weights.bits // 8
    with cgutils.for_range(builder, groups) as loop:
        place = builder.add(panel, builder.mul(loop.index, _INT64(group_bytes)))
        skipped = builder.mul(loop.index, _INT64(BLOCK_BYTES))
        sources = [builder.add(row, skipped) for row in rows]
        factors = [
            _half_floats(builder, at(builder, place, number * LANES * 2))
            for number in range(vectors * (2 if weights is Weights.INT4 else 1))
        ]
        for part in passes(len(rows), vectors):
            some = sources[part]
            totals = _emit_group(builder, weights, some, at(builder, place, head), vectors)
            target = at(builder, sums, part.start * vectors * _VECTOR_BYTES)
            _emit_scaled(builder, weights, some, totals, factors, target)


def _emit_block(builder: Any, form: Format, source: Any, target: Any) -> None:
    """Quantizes one group. Sizes are compared as integers, so that a NaN is the largest of all: it
    becomes the scale.
    """
    vectors = [
        read(builder, form, at(builder, source, first * form.itemsize))
        for first in range(0, GROUP, LANES)
    ]
    sizes = [builder.and_(builder.bitcast(each, INTS), ints(0x7FFFFFFF)) for each in vectors]

    def larger(left: Any, right: Any) -> Any:
        return builder.select(builder.icmp_signed(">", left, right), left, right)

    largest = builder.bitcast(fold(builder, larger(*sizes), larger), FLOAT)
    scale = builder.fdiv(largest, FLOAT(127.0))
    empty = builder.fcmp_ordered("<", scale, FLOAT(_SMALLEST))
    factor = builder.select(empty, FLOAT(0.0), builder.fdiv(FLOAT(1.0), scale))
    sums = ints(0)
    for first, vector in zip(range(0, GROUP, LANES), vectors, strict=True):
        scaled = call(builder, "rint", builder.fmul(vector, splat(builder, factor)))
        below = call(builder, "minnum", scaled, floats(127.0))
        numbers = builder.fptosi(call(builder, "maxnum", below, floats(-127.0)), INTS)
        sums = builder.add(sums, numbers)
        stored = builder.trunc(numbers, ir.VectorType(ir.IntType(8), LANES))
        store(builder, stored, at(builder, target, 8 + first))
    store(builder, scale, target)
    store(builder, fold(builder, sums, builder.add), at(builder, target, 4))


@intrinsic
def quantize_group(typing: Any, form: Any, source: Any, target: Any) -> Any:
    """Writes the block of the GROUP numbers at `source` to `target`."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, target = arguments
        _emit_block(builder, form.value, source, target)
        return context.get_dummy_value()

    return types.void(form, types.int64, types.int64), lower
