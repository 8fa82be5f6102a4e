"""How numbers lie in memory: sixteen of them read as float32, and float32 written as them.

e4m3 ("FP8 formats for deep learning", Micikevicius et al., 2022, arXiv 2209.05433) has one sign,
four bits of exponent and three of fraction, and no infinity. Every e4m3 is a bfloat16 too. Where a
processor looks bytes up in tables (VPERMI2B), the two bytes of that bfloat16 are looked up by the
seven bits without the sign, sixty-four at a time. Elsewhere an e4m3, shifted to where a float16 has
its exponent and fraction, is a float16 of 2 ** -8 times the value. Both are exact, and keep
subnormal numbers and NaN.
"""

from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils

from pagefleet_kernels.cpu_ir import (
    FEATURES,
    HALVES,
    INTS,
    LANES,
    VECTOR,
    Format,
    at,
    floats,
    ints,
    load,
    lower_halves,
    rounded_bits,
    shuffle,
    store,
    upper_halves,
    widen,
    widen_float16,
)

_BYTES = ir.VectorType(ir.IntType(8), LANES)
_LINE = ir.VectorType(ir.IntType(8), 4 * LANES)
_LARGEST, _NAN = 448.0, 0x7F
_SMALLEST_NORMAL = 2.0**-6
_ULP_OF_SUBNORMAL = 2.0**14
"""Added to a float32, it leaves a multiple of 2 ** -9 in the lowest bits."""

LOOKS_UP = "avx512vbmi" in FEATURES
"""Whether the processor looks bytes up in tables of 128."""


def in_memory(form: Format) -> Any:
    """The LLVM type of sixteen numbers in memory."""
    return {Format.FLOAT32: VECTOR, Format.BFLOAT16: HALVES, Format.E4M3: _BYTES}[form]


def read(builder: Any, form: Format, address: Any, count: int = LANES) -> Any:
    """`count` numbers at `address`, as sixteen float32; the other lanes are 0."""
    kind = ir.VectorType(in_memory(form).element, count)
    values = load(builder, address, kind)
    if count < LANES:
        values = shuffle(builder, values, ir.Constant(kind, None), list(range(LANES)))
    if form is Format.E4M3:
        return _widen_e4m3(builder, values)
    return values if form is Format.FLOAT32 else widen(builder, values)


def narrowed(builder: Any, form: Format, value: Any) -> Any:
    """Sixteen float32 as they are written to memory; e4m3 that are too large become the largest."""
    if form is Format.FLOAT32:
        return value
    if form is Format.E4M3:
        return _to_e4m3(builder, value)
    return builder.trunc(builder.lshr(rounded_bits(builder, value), ints(16)), HALVES)


def read_pairs(builder: Any, form: Format, address: Any) -> list[Any]:
    """Numbers at `address` as words of two bfloat16, which keep their order: thirty-two bfloat16,
    or sixty-four e4m3 where the processor looks up.
    """
    if form is Format.BFLOAT16:
        return [load(builder, address, INTS)]
    lower, upper = _look_up(builder, load(builder, address, _LINE))
    return [_zipped(builder, lower, upper, range(first, first + 32)) for first in (0, 32)]


def write_pairs(builder: Any, form: Format, address: Any, lower: Any, upper: Any) -> None:
    """Writes the numbers of two vectors in turn, rounded to the type in memory."""
    if form is Format.BFLOAT16:
        bits = [rounded_bits(builder, each) for each in (lower, upper)]
        store(builder, _pairs(builder, *bits), address)
        return
    for first in (0, LANES // 2):
        lanes = [lane + turn for lane in range(first, first + LANES // 2) for turn in (0, LANES)]
        store(builder, shuffle(builder, lower, upper, lanes), at(builder, address, 8 * first))


def read_words(builder: Any, form: Format, kept: Format, address: Any) -> list[Any]:
    """Sixteen words of 32 bits at `address`, of numbers that are `kept` so, as words in `form`: the
    first of each, the second, ...; one vector if both are the same.
    """
    if form is kept:
        return [load(builder, address, VECTOR if form is Format.FLOAT32 else INTS)]
    if LOOKS_UP:
        lower, upper = _look_up(builder, load(builder, address, _LINE))
        words = [
            _zipped(builder, lower, upper, [4 * word + byte for word in range(16) for byte in two])
            for two in ((0, 1), (2, 3))
        ]
        if form is Format.BFLOAT16:
            return words
        return [half(builder, each) for each in words for half in (lower_halves, upper_halves)]
    line = load(builder, address, INTS)
    numbers = [
        _widen_e4m3(builder, builder.trunc(builder.lshr(line, ints(8 * byte)), _BYTES))
        for byte in range(4)
    ]
    if form is Format.FLOAT32:
        return numbers
    bits = [builder.bitcast(each, INTS) for each in numbers]
    return [_pairs(builder, *bits[:2]), _pairs(builder, *bits[2:])]


def _pairs(builder: Any, lower: Any, upper: Any) -> Any:
    """Words of two bfloat16, out of the upper sixteen bits of two vectors of 32."""
    return builder.or_(builder.lshr(lower, ints(16)), builder.and_(upper, ints(-0x10000)))


def read_twins(builder: Any, addresses: Sequence[Any], count: int) -> list[Any]:
    """e4m3 of two rows as words of two bfloat16, one of each row: sixty-four in the order that
    `in_order` undoes, where the processor looks up; otherwise as many as lanes, or fewer.
    """
    if count <= LANES:
        rows = [read(builder, Format.E4M3, address, count) for address in addresses]
        return [_pairs(builder, *(builder.bitcast(row, INTS) for row in rows))]
    first, second = (load(builder, address, _LINE) for address in addresses)
    return [
        builder.bitcast(_interleaved(builder, lower, upper, half), INTS)
        for outer in (0, 8)
        for lower, upper in [_look_up(builder, _interleaved(builder, first, second, outer))]
        for half in (0, 8)
    ]


def in_order(builder: Any, chunks: Sequence[Any]) -> list[Any]:
    """Sixty-four numbers, of which every four chunks of four lanes lie across four vectors."""
    first, second, third, fourth = chunks
    ordered = []
    for begin in range(0, LANES, 4):
        lanes = [lane + turn for turn in (0, LANES) for lane in range(begin, begin + 4)]
        lower, upper = (
            shuffle(builder, first, second, lanes),
            shuffle(builder, third, fourth, lanes),
        )
        ordered.append(shuffle(builder, lower, upper, list(range(LANES))))
    return ordered


def _interleaved(builder: Any, first: Any, second: Any, half: int) -> Any:
    """The bytes of two lines in turn, of those from number `half` on of every sixteen."""
    places = [group + half + byte for group in range(0, 64, 16) for byte in range(8)]
    return shuffle(builder, first, second, [byte + turn for byte in places for turn in (0, 64)])


def _constant(kind: Any, values: list[int]) -> Any:
    return ir.Constant(kind, values)


def _tables() -> list[list[Any]]:
    """The lower and the upper byte of the bfloat16 of every e4m3 that is not negative."""
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    bytes_of = codes.to(torch.bfloat16).view(torch.uint8).view(128, 2).T.tolist()
    return [[_constant(_LINE, each[:64]), _constant(_LINE, each[64:])] for each in bytes_of]


_LOWER, _UPPER = _tables()


def _look_up(builder: Any, codes: Any) -> tuple[Any, Any]:
    """The lower and the upper bytes of the bfloat16 of sixty-four e4m3."""
    kind = ir.FunctionType(_LINE, [_LINE] * 3)
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    permute = cgutils.get_or_insert_function(builder.module, kind, name)
    lower, upper = (
        builder.call(permute, [table[0], codes, table[1]]) for table in (_LOWER, _UPPER)
    )
    signs = builder.and_(codes, _constant(_LINE, [0x80] * 64))
    return lower, builder.or_(upper, signs)


def _zipped(builder: Any, lower: Any, upper: Any, places: Any) -> Any:
    """Words of the bytes at `places`, a lower and an upper one in turn."""
    return builder.bitcast(
        shuffle(builder, lower, upper, [byte + 64 * up for byte in places for up in (0, 1)]), INTS
    )


def _widen_e4m3(builder: Any, codes: Any) -> Any:
    def halves(value: int) -> Any:
        return _constant(HALVES, [value] * LANES)

    wide = builder.shl(builder.sext(codes, HALVES), halves(7))  # the sign is there twice
    numbers = widen_float16(builder, builder.and_(wide, halves(0xBFFF)))
    values = builder.fmul(numbers, floats(256.0))
    magnitude = builder.and_(codes, _constant(_BYTES, [0x7F] * LANES))
    unusual = builder.icmp_unsigned("==", magnitude, _constant(_BYTES, [_NAN] * LANES))
    return builder.select(unusual, floats(float("nan")), values)


def _to_e4m3(builder: Any, value: Any) -> Any:
    """To nearest, ties to even."""
    given = builder.bitcast(value, INTS)
    size = builder.bitcast(builder.and_(given, ints(0x7FFFFFFF)), VECTOR)
    large = builder.fcmp_ordered(">", size, floats(_LARGEST))
    limited = builder.select(large, floats(_LARGEST), size)
    bits = builder.bitcast(limited, INTS)
    odd = builder.and_(builder.lshr(bits, ints(20)), ints(1))
    up = builder.add(bits, builder.add(odd, ints(0x7FFFF)))
    normal = builder.sub(builder.lshr(up, ints(20)), ints(120 << 3))
    shifted = builder.bitcast(builder.fadd(limited, floats(_ULP_OF_SUBNORMAL)), INTS)
    small = builder.fcmp_ordered("<", limited, floats(_SMALLEST_NORMAL))
    codes = builder.select(small, builder.and_(shifted, ints(0xF)), normal)
    unusual = builder.fcmp_unordered("uno", value, value)
    codes = builder.select(unusual, ints(_NAN), codes)
    sign = builder.and_(builder.lshr(given, ints(24)), ints(0x80))
    return builder.trunc(builder.or_(codes, sign), _BYTES)
