"""Vectors of 64 bytes on the CPU: products of four neighbours added up, and tables of sixteen.

There is one instruction for such products (VPDPBUSD of AVX-512 VNNI), or there are two, which add
them up in 16 bits first (VPMADDUBSW and VPMADDWD of AVX2), or neither. All are exact, but the sum
of a pair must fit in 16 bits: one factor is a size below 129, so that it is 2 * 128 * 127 at most.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from pagefleet_kernels.cpu_ir import FEATURES, INTS, LANES, ints, shuffle

BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
SHORTS = ir.VectorType(ir.IntType(16), 2 * LANES)

ADDS_FOUR = "avx512vnni" in FEATURES
"""Whether the processor adds up four products of bytes at a time."""

ADDS_PAIRS = "avx2" in FEATURES and not ADDS_FOUR
"""Whether it adds up two of them instead."""

_SHUFFLES_LINES = "avx512bw" in FEATURES
"""Whether the processor looks 64 bytes up at a time; with AVX2 it does 32."""


def multiply_add_bytes(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """total + the products of the four bytes of each lane, where pairs are not added; those of
    `left` have no sign. All are int32 vectors.
    """
    if ADDS_FOUR:
        kind = ir.FunctionType(INTS, [INTS, BYTES, BYTES])
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        operands = [builder.bitcast(each, BYTES) for each in (left, right)]
        return builder.call(function, [total, *operands])
    for shift in range(0, 32, 8):
        unsigned = builder.and_(builder.lshr(left, ints(shift)), ints(0xFF))
        signed = builder.ashr(builder.shl(right, ints(24 - shift)), ints(24))
        total = builder.add(total, builder.mul(unsigned, signed))
    return total


def sizes_and_signed(builder: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Bytes without a sign, and others, whose products are those of `left` and `right`: the sizes
    of the one, and the other with its signs, -128 excepted. Where pairs are added only.
    """
    kind = ir.FunctionType(BYTES, [BYTES, ir.IntType(1)])
    size = cgutils.get_or_insert_function(builder.module, kind, "llvm.abs.v64i8")
    sizes = builder.call(size, [left, ir.IntType(1)(0)])
    return sizes, _by_halves(builder, "psign.b", right, left, BYTES)


def pairs(builder: Any, left: Any, right: Any) -> Any:
    """The products of bytes, two of them added, in 16 bits; those of `left` have no sign."""
    return _by_halves(builder, "pmadd.ub.sw", left, right, SHORTS)


def add_neighbours(builder: Any, shorts: Any) -> Any:
    """Two neighbours each added, in 32 bits."""
    ones = ir.Constant(SHORTS, [1] * SHORTS.count)
    return _by_halves(builder, "pmadd.wd", shorts, ones, INTS)


def constant_bytes(values: Sequence[int]) -> Any:
    """A constant vector."""
    return ir.Constant(BYTES, list(values))


def look_up(builder: Any, table: Sequence[int], codes: Any) -> Any:
    """The bytes of a table of sixteen for codes below sixteen."""
    if _SHUFFLES_LINES:
        kind = ir.FunctionType(BYTES, [BYTES, BYTES])
        name = "llvm.x86.avx512.pshuf.b.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [constant_bytes([*table] * 4), codes])
    if "avx2" in FEATURES:
        return _by_halves(builder, "pshuf.b", constant_bytes([*table] * 4), codes, BYTES)
    found = constant_bytes([table[0]] * BYTES.count)
    for code, byte in enumerate(table):
        here = builder.icmp_unsigned("==", codes, constant_bytes([code] * BYTES.count))
        found = builder.select(here, constant_bytes([byte] * BYTES.count), found)
    return found


def _by_halves(builder: Any, name: str, left: Any, right: Any, kind: ir.VectorType) -> Any:
    """An instruction of AVX2, whose vectors have half the size, of two vectors."""
    count = left.type.count // 2
    given = ir.VectorType(left.type.element, count)
    made = ir.VectorType(kind.element, kind.count // 2)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(made, [given, given]), f"llvm.x86.avx2.{name}"
    )

    def half(first: int) -> Any:
        places = list(range(first, first + count))
        operands = [shuffle(builder, each, each, places) for each in (left, right)]
        return builder.call(function, operands)

    return shuffle(builder, half(0), half(count), list(range(kind.count)))
