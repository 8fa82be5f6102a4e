"""The inner loop of products with quantized matrices (see `quantized`) on the CPU.

It goes through a panel as `cpu_gemm` does, but group by group. Within a group four inputs at a time
are multiplied in integers, by VPDPBUSD where the processor has it; these sums are exact. Then the
group's sum is scaled and added to a float32, so that an output is one chain of multiply-adds in the
order of the groups, whatever stands beside it.

A quantized row is a row of blocks, one for each group: its scale (float32), the sum of its numbers
(int32), its numbers (int8). The sum is there because VPDPBUSD wants weights without a sign: what
they are too large by is taken off at the start. Floats of four bits are looked up in a table of
sixteen such bytes, in registers (VPSHUFB).
"""

import enum
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pagefleet_kernels.cpu_formats import read
from pagefleet_kernels.cpu_ir import (
    FEATURES,
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
    splat,
    store,
    widen_float16,
)
from pagefleet_kernels.quantized import E2M1_HALVES, GROUP, Matrix, Quantized

_MULTIPLIES_BYTES = "avx512vnni" in FEATURES
"""Whether the processor multiplies and adds four bytes at a time."""

_SHUFFLES_BYTES = "avx512bw" in FEATURES
"""Whether the processor looks 64 bytes up at a time, each in a table of sixteen."""

_INT64 = ir.IntType(64)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
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
        return {Weights.INT8: 128, Weights.FLOAT4: -min(E2M1_HALVES)}.get(self, 0)


constant_in_kernels(Weights)
attribute_in_kernels("grouped")


def _quadrupled(builder: Any, weights: Any, values: Any, total: Any) -> Any:
    """total + the products of the four bytes of each lane; those of `weights` have no sign."""
    if _MULTIPLIES_BYTES:
        kind = ir.FunctionType(INTS, [INTS, _BYTES, _BYTES])
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        operands = [builder.bitcast(each, _BYTES) for each in (weights, values)]
        return builder.call(function, [total, *operands])
    for shift in range(0, 32, 8):
        weight = builder.and_(builder.lshr(weights, ints(shift)), ints(0xFF))
        value = builder.ashr(builder.shl(values, ints(24 - shift)), ints(24))
        total = builder.add(total, builder.mul(weight, value))
    return total


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
    codes = builder.bitcast(nibbles, _BYTES)
    table = [each + Weights.FLOAT4.added for each in E2M1_HALVES]
    if _SHUFFLES_BYTES:
        kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
        name = "llvm.x86.avx512.pshuf.b.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.bitcast(builder.call(function, [_bytes(4 * table), codes]), INTS)
    found = _bytes([table[0]] * 64)
    for code, number in enumerate(table):
        here = builder.icmp_unsigned("==", codes, _bytes([code] * 64))
        found = builder.select(here, _bytes([number] * 64), found)
    return builder.bitcast(found, INTS)


def _bytes(values: list[int]) -> Any:
    return ir.Constant(_BYTES, values)


def _emit_group(
    builder: Any, weights: Weights, sources: list[Any], numbers: Any, vectors: int
) -> list[Any]:
    """The exact sums of one group: int32 vectors for each row, and in it for each vector.

    A loop of few instructions, which LLVM unrolls where all sums stay in registers.
    """
    starts = []
    for source in sources:
        start = ints(0)
        if weights.added:
            sum_ = load(builder, at(builder, source, 4), INT)
            start = splat(builder, builder.mul(sum_, INT(-weights.added)))
        starts += [start] * vectors
    before = builder.block
    body, after = builder.append_basic_block("inputs"), builder.append_basic_block("summed")
    builder.branch(body)
    builder.position_at_end(body)
    step = builder.phi(_INT64)
    totals = [builder.phi(INTS) for _ in starts]
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
                grown[index] = _quadrupled(builder, column[part], spread, grown[index])
    following = builder.add(step, _INT64(1))
    step.add_incoming(_INT64(0), before)
    step.add_incoming(following, body)
    for total, start, sum_ in zip(totals, starts, grown, strict=True):
        total.add_incoming(start, before)
        total.add_incoming(sum_, body)
    builder.cbranch(builder.icmp_signed("<", following, _INT64(GROUP // inputs)), body, after)
    builder.position_at_end(after)
    return grown


def _emit_scaled(
    builder: Any, weights: Weights, sources: list[Any], totals: list[Any], place: Any, sums: Any
) -> None:
    """Adds the sums of one group, scaled, to the float32 at `sums`."""
    vectors = len(totals) // len(sources)
    kinds = 2 if weights is Weights.INT4 else 1
    factors = [
        _half_floats(builder, at(builder, place, v * LANES * 2)) for v in range(kinds * vectors)
    ]
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
        totals = _emit_group(builder, weights, sources, at(builder, place, head), vectors)
        _emit_scaled(builder, weights, sources, totals, place, sums)


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
