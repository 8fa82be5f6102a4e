"""LLVM IR for vectors of sixteen floats: what the instructions of `cpu_simd` are made of.

A `Format` says how numbers lie in memory when a kernel is compiled (`cpu_formats` for how they are
read and written). bfloat16 has no arithmetic of its own: it is widened to float32 (sixteen bits
shifted up) and rounded to nearest even. The functions here take an LLVM builder and LLVM values.
"""

import enum
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils, registry
from numba.core.datamodel import models
from numba.core.imputils import lower_constant
from numba.extending import overload_attribute, register_model, typeof_impl

device: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(
    error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""Compiles a function for use inside of kernels."""

intrinsic: Callable[[Callable[..., Any]], Any] = numba.extending.intrinsic
"""Makes an instruction out of a function that returns its signature and what writes its IR."""

LANES = 16
FLOAT = ir.FloatType()
INT = ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT, LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)

_ROUNDING = 1.5 * 2**23


def _features() -> frozenset[str]:
    _, _, told = registry.cpu_target.target_context.codegen().magic_tuple()
    return frozenset(each[1:] for each in told.split(",") if each.startswith("+"))


FEATURES = _features()
"""What the processor that is compiled for can do, by LLVM's names: that of this machine, unless
numba is told of another one (`NUMBA_CPU_NAME`, `NUMBA_CPU_FEATURES`).
"""

MULTIPLIES_BFLOAT16 = "avx512bf16" in FEATURES
"""Whether the processor multiplies bfloat16 without widening it."""

WIDENS_FLOAT16 = "f16c" in FEATURES or "sse2" not in FEATURES
"""Whether the processor widens float16; those that are not x86 do."""

SUMS = 24 if "avx512f" in FEATURES else 5
"""Vectors of sums that stay in registers, beside those of weights and an input."""


class Format(enum.Enum):
    """How numbers lie in memory."""

    FLOAT32 = 4
    BFLOAT16 = 2
    E4M3 = 1
    """For keys and values only."""

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return self.value


class Constant(types.Type):  # type: ignore[misc]
    """The type of a value that is known when a kernel is compiled and takes no room in it."""

    def __init__(self, value: object) -> None:
        self.value = value
        super().__init__(name=f"Constant({value})")


class VectorType(types.Type):  # type: ignore[misc]
    """Sixteen float32 lanes in a register."""


float32x16 = VectorType("float32x16")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: VectorType) -> None:
        super().__init__(manager, kind, VECTOR)


register_model(Constant)(models.OpaqueModel)


def constant_in_kernels(kind: type) -> None:
    """Lets kernels close over values of a class, which they see when they are compiled."""
    typeof_impl.register(kind, lambda value, context: Constant(value))


def _lower_constant(context: Any, builder: Any, kind: Constant, value: object) -> Any:
    return context.get_dummy_value()


def attribute_in_kernels(name: str) -> None:
    """Lets kernels read an attribute of such a value, as the constant that it is."""

    def attribute(holder: Constant) -> Any:
        value = getattr(holder.value, name)

        def constant(holder: Constant) -> Any:
            return value

        return constant

    overload_attribute(Constant, name)(attribute)


lower_constant(Constant)(_lower_constant)
constant_in_kernels(Format)
attribute_in_kernels("itemsize")


def passes(rows: int, vectors: int) -> list[slice]:
    """The rows whose sums, so many vectors each, grow together in registers."""
    together = max(1, SUMS // vectors)
    return [slice(first, min(first + together, rows)) for first in range(0, rows, together)]


def pointer(builder: Any, address: Any, kind: ir.Type) -> Any:
    """`address` as a pointer to `kind`."""
    return builder.inttoptr(address, kind.as_pointer())


def at(builder: Any, address: Any, offset: int) -> Any:
    """`address + offset`, in bytes."""
    return builder.add(address, ir.Constant(address.type, offset)) if offset else address


def splat(builder: Any, scalar: Any) -> Any:
    """All lanes set to `scalar`."""
    vector = ir.VectorType(scalar.type, LANES)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, INT(0))
    return builder.shuffle_vector(single, single, ir.Constant(INTS, [0] * LANES))


def shuffle(builder: Any, left: Any, right: Any, lanes: list[int]) -> Any:
    """Picks lanes out of `left` (0-15) and `right` (16-31)."""
    mask = ir.Constant(ir.VectorType(INT, len(lanes)), lanes)
    return builder.shuffle_vector(left, right, mask)


def floats(value: float) -> Any:
    """A constant vector."""
    return ir.Constant(VECTOR, [ir.Constant(FLOAT, value)] * LANES)


def ints(value: int) -> Any:
    """A constant vector of 32-bit integers."""
    return ir.Constant(INTS, [value] * LANES)


def call(builder: Any, name: str, *operands: Any) -> Any:
    """An LLVM intrinsic over vectors, such as `fma`."""
    kind = operands[0].type
    full = f"llvm.{name}.v{LANES}f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * len(operands)), full
    )
    return builder.call(function, operands)


def load(builder: Any, address: Any, kind: ir.Type = VECTOR) -> Any:
    """What lies at `address`, which need only be aligned for one number."""
    return builder.load(pointer(builder, address, kind), align=2)


def store(builder: Any, value: Any, address: Any) -> None:
    """Writes `value` to `address`, which need only be aligned for one number."""
    builder.store(value, pointer(builder, address, value.type), align=2)


def fold(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes combined by halves: lane l with l + 8, then l + 4, l + 2, l + 1."""
    width = LANES
    while width > 1:
        width //= 2
        value = combine(
            shuffle(builder, value, value, list(range(width))),
            shuffle(builder, value, value, list(range(width, 2 * width))),
        )
    return builder.extract_element(value, INT(0))


def larger(builder: Any, left: Any, right: Any) -> Any:
    """The larger, lane by lane; `right` where one is NaN."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def smaller(builder: Any, left: Any, right: Any) -> Any:
    """The smaller, lane by lane; `right` where one is NaN."""
    return builder.select(builder.fcmp_ordered("<", left, right), left, right)


def exponential(builder: Any, value: Any) -> Any:
    """e ** value within 2 units in the last place; exactly 0 below -87, no overflow above 88.

    Cody and Waite (1980, chapter 6): e ** x = 2 ** n * e ** r with n = round(x / ln 2), ln 2 in
    two parts so that r is exact, and a polynomial for |r| <= ln(2) / 2 (Cephes' coefficients). The
    sum with 1.5 * 2 ** 23 rounds, and leaves n in the lowest bits.
    """
    high = builder.fcmp_ordered(">", value, floats(88.0))
    clamped = builder.select(high, floats(88.0), value)
    shifted = call(builder, "fma", clamped, floats(1.4426950216293335), floats(_ROUNDING))
    exponent = builder.fsub(shifted, floats(_ROUNDING))
    rest = call(builder, "fma", exponent, floats(-0.693359375), clamped)
    rest = call(builder, "fma", exponent, floats(2.1219444e-4), rest)
    result = floats(1.9875691500e-4)
    for coefficient in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
        1.0,
        1.0,
    ):
        result = call(builder, "fma", result, rest, floats(coefficient))
    power = builder.add(builder.shl(builder.bitcast(shifted, INTS), ints(23)), ints(127 << 23))
    raised = builder.fmul(result, builder.bitcast(power, VECTOR))
    low = builder.fcmp_ordered("<", value, floats(-87.0))
    return builder.select(low, floats(0.0), raised)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def lower_halves(builder: Any, words: Any) -> Any:
    """The bfloat16 in the lower half of each word, widened to float32."""
    return builder.bitcast(builder.shl(words, ints(16)), VECTOR)


def upper_halves(builder: Any, words: Any) -> Any:
    """The bfloat16 in the upper half of each word, widened to float32."""
    return builder.bitcast(builder.and_(words, ints(-0x10000)), VECTOR)


def multiply_add_words(builder: Any, form: Format, left: Any, right: Any, total: Any) -> Any:
    """total + the products of the numbers in each 32-bit word. Two bfloat16 are multiplied by one
    instruction (VDPBF16PS), or else widened, the lower ones first.
    """
    if form is Format.FLOAT32:
        return call(builder, "fma", left, right, total)
    if not MULTIPLIES_BFLOAT16:
        for half in (lower_halves, upper_halves):
            total = call(builder, "fma", half(builder, left), half(builder, right), total)
        return total
    kind = ir.FunctionType(VECTOR, [VECTOR, _BFLOATS, _BFLOATS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    pairs = [builder.bitcast(each, _BFLOATS) for each in (left, right)]
    return builder.call(function, [total, *pairs])


def widen(builder: Any, halves: Any) -> Any:
    """bfloat16 (as 16-bit integers) to float32, lane by lane."""
    return builder.bitcast(builder.shl(builder.zext(halves, INTS), ints(16)), VECTOR)


def widen_float16(builder: Any, halves: Any) -> Any:
    """float16 (as 16-bit integers) to float32, lane by lane; they must be finite."""
    if WIDENS_FLOAT16:
        numbers = builder.bitcast(halves, ir.VectorType(ir.HalfType(), LANES))
        return builder.fpext(numbers, VECTOR)
    bits = builder.zext(halves, INTS)
    size = builder.shl(builder.and_(bits, ints(0x7FFF)), ints(13))
    sign = builder.shl(builder.and_(bits, ints(0x8000)), ints(16))
    scaled = builder.fmul(builder.bitcast(size, VECTOR), floats(2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, INTS), sign), VECTOR)


def rounded_bits(builder: Any, value: Any) -> Any:
    """float32 rounded to bfloat16, to nearest even; the result is in the upper sixteen bits."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    up = builder.add(bits, builder.add(odd, ints(0x7FFF)))
    unusual = builder.fcmp_unordered("uno", value, value)
    return builder.select(unusual, builder.or_(bits, ints(0x400000)), up)
