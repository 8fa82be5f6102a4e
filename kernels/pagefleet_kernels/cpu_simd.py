"""Sixteen floats at a time: the vector type that the CPU kernels are written with, for numba.

A kernel that must give the same bits wherever a token is computed cannot leave the order of its
sums to an optimizer. So nothing here is vectorized by chance and no fast-math flag is set: every
multiply-add, shuffle and reduction below is one LLVM instruction on `<16 x float>`, which IEEE 754
defines to the last bit. LLVM only picks registers (one zmm register, or two ymm ones on a
processor without AVX-512).

Memory is addressed by plain 64-bit integers, as `Tensor.data_ptr()` gives them.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pagefleet_kernels.cpu_formats import in_memory, narrowed, read
from pagefleet_kernels.cpu_ir import (
    FLOAT,
    INT,
    INTS,
    LANES,
    VECTOR,
    Format,
    call,
    exponential,
    float32x16,
    fold,
    intrinsic,
    larger,
    load,
    pointer,
    shuffle,
    smaller,
    splat,
    store,
    widen,
)


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
maximum = _binary(larger)
minimum = _binary(smaller)
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
    """The largest lane; none may be NaN."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, width = arguments[0], LANES
        while width > 1:
            width //= 2
            turned = [(lane + width) % LANES for lane in range(LANES)]
            value = larger(builder, shuffle(builder, value, value, turned), value)
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
def store_words(typing: Any, form: Any, address: Any, vector: Any, count: Any) -> Any:
    """The first `count` lanes, rounded to the type in memory; of every 64 bytes from `address` on
    the first four get the next of them, a float32, two bfloat16 or four e4m3.
    """

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, address, vector, count = arguments
        place = cgutils.alloca_once(builder, in_memory(form.value))
        builder.store(narrowed(builder, form.value, vector), place)
        words = builder.bitcast(place, INT.as_pointer())
        per_word = ir.Constant(count.type, 4 // form.value.itemsize)
        with cgutils.for_range(builder, builder.udiv(count, per_word)) as loop:
            word = builder.load(builder.gep(words, [loop.index]))
            line = builder.mul(loop.index, ir.Constant(count.type, 4 * LANES))
            builder.store(word, pointer(builder, builder.add(address, line), INT))
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
def store_int32(typing: Any, address: Any, value: Any) -> Any:
    """The lower half of an int64."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, value = arguments
        builder.store(builder.trunc(value, INT), pointer(builder, address, INT))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), lower


@intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Atomically adds to the int64 at `address` and gives what it was; orders all memory."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        return builder.atomic_rmw(
            "add", pointer(builder, arguments[0], word), arguments[1], "seq_cst"
        )

    return types.int64(types.int64, types.int64), lower
