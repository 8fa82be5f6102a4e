"""Sixteen floats at a time: the vector type that the CPU kernels are written with, for numba.

A kernel that must give the same bits wherever a token is computed cannot leave the order of its
sums to an optimizer. So nothing here is vectorized by chance and no fast-math flag is set: every
multiply-add, shuffle and reduction below is one LLVM instruction on `<16 x float>`, which IEEE 754
defines to the last bit. LLVM only picks registers (one zmm register, or two ymm ones on a
processor without AVX-512).

Memory is addressed by plain 64-bit integers, as `Tensor.data_ptr()` gives them. bfloat16 has no
arithmetic of its own: it is widened to float32 on load (sixteen bits shifted up) and rounded to
nearest even on store. A `Format` names the type in memory at compile time.
"""

import enum
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
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


class Format(enum.Enum):
    """How numbers lie in memory."""

    FLOAT32 = 4
    BFLOAT16 = 2

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


# --- what the instructions are, as functions that write LLVM IR ---


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


def exponential(builder: Any, value: Any) -> Any:
    """e ** value within 2 units in the last place; exactly 0 below -87, no overflow above 88.

    Cody and Waite (1980, chapter 6): e ** x = 2 ** n * e ** r with n = round(x / ln 2), ln 2 in
    two parts so that r is exact, and a polynomial for |r| <= ln(2) / 2 (Cephes' coefficients).
    """
    clamped = call(builder, "minnum", value, floats(88.0))
    exponent = call(builder, "rint", builder.fmul(clamped, floats(1.4426950216293335)))
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
    low = builder.fcmp_ordered("<", value, floats(-87.0))
    whole = builder.fptosi(builder.select(low, floats(0.0), exponent), INTS)
    bits = builder.add(builder.bitcast(result, INTS), builder.shl(whole, ints(23)))
    unusual = builder.fcmp_unordered("uno", value, value)
    powered = builder.select(unusual, value, builder.bitcast(bits, VECTOR))
    return builder.select(low, floats(0.0), powered)


def widen(builder: Any, halves: Any) -> Any:
    """bfloat16 (as 16-bit integers) to float32, lane by lane."""
    return builder.bitcast(builder.shl(builder.zext(halves, INTS), ints(16)), VECTOR)


def rounded_bits(builder: Any, value: Any) -> Any:
    """float32 rounded to bfloat16, to nearest even; the result is in the upper sixteen bits."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    up = builder.add(bits, builder.add(odd, ints(0x7FFF)))
    unusual = builder.fcmp_unordered("uno", value, value)
    return builder.select(unusual, builder.or_(bits, ints(0x400000)), up)


def in_memory(form: Format) -> Any:
    """The LLVM type of sixteen numbers in memory."""
    return VECTOR if form is Format.FLOAT32 else HALVES


def read(builder: Any, form: Format, address: Any) -> Any:
    """Sixteen numbers at `address`, as float32."""
    values = load(builder, address, in_memory(form))
    return values if form is Format.FLOAT32 else widen(builder, values)


def narrowed(builder: Any, form: Format, value: Any) -> Any:
    """Sixteen float32 as they are written to memory."""
    if form is Format.FLOAT32:
        return value
    return builder.trunc(builder.lshr(rounded_bits(builder, value), ints(16)), HALVES)


# --- the instructions, for kernels written in Python ---


def _unary(emit: Callable[[Any, Any], Any]) -> Any:
    """An instruction from a vector to a vector."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit(builder, arguments[0])

    def instruction(typing: Any, a: Any) -> Any:
        return float32x16(float32x16), lower

    return intrinsic(instruction)


def _binary(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """An instruction from two vectors to a vector."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit(builder, arguments[0], arguments[1])

    def instruction(typing: Any, a: Any, b: Any) -> Any:
        return float32x16(float32x16, float32x16), lower

    return intrinsic(instruction)


add = _binary(lambda builder, a, b: builder.fadd(a, b))
subtract = _binary(lambda builder, a, b: builder.fsub(a, b))
multiply = _binary(lambda builder, a, b: builder.fmul(a, b))
divide = _binary(lambda builder, a, b: builder.fdiv(a, b))
maximum = _binary(lambda builder, a, b: call(builder, "maxnum", a, b))
negative = _unary(lambda builder, a: builder.fneg(a))
exp = _unary(exponential)


@intrinsic
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return call(builder, "fma", *arguments)

    return float32x16(float32x16, float32x16, float32x16), lower


@intrinsic
def broadcast(typing: Any, scalar: Any) -> Any:
    """All lanes set to a float32."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return splat(builder, arguments[0])

    return float32x16(types.float32), lower


@intrinsic
def first(typing: Any, vector: Any) -> Any:
    """Lane 0."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.extract_element(arguments[0], INT(0))

    return types.float32(float32x16), lower


@intrinsic
def total(typing: Any, vector: Any) -> Any:
    """The sum of the lanes, by halves."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return fold(builder, arguments[0], builder.fadd)

    return types.float32(float32x16), lower


@intrinsic
def largest(typing: Any, vector: Any) -> Any:
    """The largest lane that is not NaN."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, width = arguments[0], LANES
        while width > 1:
            width //= 2
            turned = [(lane + width) % LANES for lane in range(LANES)]
            value = call(builder, "maxnum", value, shuffle(builder, value, value, turned))
        return builder.extract_element(value, INT(0))

    return types.float32(float32x16), lower


@intrinsic
def keep(typing: Any, vector: Any, low: Any, high: Any, other: Any) -> Any:
    """The lanes low <= lane < high of `vector`, and the scalar `other` in the rest."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, low, high, other = arguments
        lanes = ir.Constant(INTS, list(range(LANES)))
        above = builder.icmp_signed(">=", lanes, splat(builder, builder.trunc(low, INT)))
        below = builder.icmp_signed("<", lanes, splat(builder, builder.trunc(high, INT)))
        return builder.select(builder.and_(above, below), vector, splat(builder, other))

    return float32x16(float32x16, types.int64, types.int64, types.float32), lower


@intrinsic
def ramp(typing: Any, start: Any) -> Any:
    """start, start + 1, ... as floats."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        steps = ir.Constant(VECTOR, [ir.Constant(FLOAT, float(lane)) for lane in range(LANES)])
        begin = builder.sitofp(arguments[0], FLOAT)
        return builder.fadd(splat(builder, begin), steps)

    return float32x16(types.int64), lower


@intrinsic
def load_numbers(typing: Any, form: Any, address: Any) -> Any:
    """Sixteen numbers of the type in memory."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return read(builder, form.value, arguments[1])

    return float32x16(form, types.int64), lower


@intrinsic
def store_numbers(typing: Any, form: Any, address: Any, vector: Any) -> Any:
    """Sixteen numbers, rounded to the type in memory."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        store(builder, narrowed(builder, form.value, arguments[2]), arguments[1])
        return context.get_dummy_value()

    return types.void(form, types.int64, float32x16), lower


@intrinsic
def load_few(typing: Any, form: Any, address: Any, count: Any) -> Any:
    """Fewer than sixteen numbers of the type in memory; the other lanes are 0."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, address, count = arguments
        place = cgutils.alloca_once_value(builder, ir.Constant(in_memory(form.value), None))
        builder.store(ir.Constant(in_memory(form.value), None), place)
        source = builder.inttoptr(address, place.type)
        cgutils.raw_memcpy(builder, place, source, count, form.value.itemsize)
        return read(builder, form.value, builder.ptrtoint(place, address.type))

    return float32x16(form, types.int64, types.int64), lower


@intrinsic
def store_few(typing: Any, form: Any, address: Any, vector: Any, count: Any) -> Any:
    """The first `count` lanes, rounded to the type in memory."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, address, vector, count = arguments
        place = cgutils.alloca_once(builder, in_memory(form.value))
        builder.store(narrowed(builder, form.value, vector), place)
        target = builder.inttoptr(address, place.type)
        cgutils.raw_memcpy(builder, target, place, count, form.value.itemsize)
        return context.get_dummy_value()

    return types.void(form, types.int64, float32x16, types.int64), lower


@intrinsic
def rounded(typing: Any, form: Any, vector: Any) -> Any:
    """What would be read again after a store."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if form.value is Format.FLOAT32:
            return arguments[1]
        return widen(builder, narrowed(builder, form.value, arguments[1]))

    return float32x16(form, float32x16), lower


@intrinsic
def copy_bytes(typing: Any, target: Any, source: Any, size: Any) -> Any:
    """Copies `size` bytes."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source, size = arguments
        byte = ir.IntType(8)
        cgutils.raw_memcpy(
            builder, pointer(builder, target, byte), pointer(builder, source, byte), size, 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), lower


@intrinsic
def load_floats(typing: Any, address: Any) -> Any:
    """Sixteen float32 of the kernel's own scratch."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return load(builder, arguments[0])

    return float32x16(types.int64), lower


@intrinsic
def store_floats(typing: Any, address: Any, vector: Any) -> Any:
    """Sixteen float32 to the kernel's own scratch."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        store(builder, arguments[1], arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64, float32x16), lower


def _scalar(kind: Any, llvm: ir.Type) -> tuple[Any, Any]:
    """The instructions that load and store one number."""

    def loading(typing: Any, address: Any) -> Any:
        def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(pointer(builder, arguments[0], llvm))

        return kind(types.int64), lower

    def storing(typing: Any, address: Any, value: Any) -> Any:
        def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store(arguments[1], pointer(builder, arguments[0], llvm))
            return context.get_dummy_value()

        return types.void(types.int64, kind), lower

    return intrinsic(loading), intrinsic(storing)


load_float, store_float = _scalar(types.float32, FLOAT)
load_int64, store_int64 = _scalar(types.int64, ir.IntType(64))


@intrinsic
def load_int32(typing: Any, address: Any) -> Any:
    """One int32, as an int64."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(pointer(builder, arguments[0], INT))
        return builder.sext(value, ir.IntType(64))

    return types.int64(types.int64), lower


@intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Atomically adds to the int64 at `address` and gives what it was; orders all memory."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        return builder.atomic_rmw(
            "add", pointer(builder, arguments[0], word), arguments[1], "seq_cst"
        )

    return types.int64(types.int64, types.int64), lower
