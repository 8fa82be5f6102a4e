"""What stands between the linear layers on the CPU: norms and activations, one pass each.

Rounding is the reference's, step by step, so that bfloat16 means the same everywhere. A row is done
by one thread with one order of sums, whatever the batch.
"""

import ctypes
import functools
import math
from typing import Any

import torch
from numba import carray
from torch import Tensor

from pagefleet_kernels import reference
from pagefleet_kernels.cpu_grouped import BLOCK_BYTES, quantize_group
from pagefleet_kernels.cpu_ir import Format, device
from pagefleet_kernels.cpu_launch import FORMATS, Kernel, address_of, fields, next_task, threads_for
from pagefleet_kernels.cpu_simd import (
    add,
    broadcast,
    divide,
    exp,
    load_few,
    load_numbers,
    maximum,
    minimum,
    multiply,
    multiply_add,
    negative,
    rounded,
    store_few,
    store_numbers,
    total,
)
from pagefleet_kernels.layers import CLAMP, CLAMP_SLOPE, Activation
from pagefleet_kernels.quantized import GROUP

_ROWS_OF_A_TASK = 4
_FLOAT32 = Format.FLOAT32

_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


class NormArguments(ctypes.Structure):
    """What the norms hand to the compiled code; strides are in bytes. `residual` is 0 where there
    is none, as are `weight` and `post`, which are float32 if `wide`. A row is cut into `parts`
    vectors of `size` numbers, each normed by itself.
    """

    _fields_ = fields(
        "rows parts size values stride residual added weight output post wide", "eps factor"
    )


class GateArguments(ctypes.Structure):
    """What `gate_mul` hands to the compiled code; the stride is in bytes."""

    _fields_ = fields("rows size gate_up stride output activation")


class QuantizeArguments(ctypes.Structure):
    """What `quantized` hands to the compiled code; strides are in bytes. A row has `groups`."""

    _fields_ = fields("rows groups values stride output output_stride")


@device
def _load(form: Any, address: int, count: int) -> Any:
    """Up to sixteen numbers."""
    if count >= 16:
        return load_numbers(form, address)
    return load_few(form, address, count)


@device
def _store(form: Any, address: int, vector: Any, count: int) -> None:
    """Up to sixteen numbers."""
    if count >= 16:
        store_numbers(form, address, vector)
    else:
        store_few(form, address, vector, count)


@device
def _scale(arguments: Any, squares: Any) -> Any:
    """The reciprocal of the root of the mean of squares, in all lanes."""
    return broadcast(1.0 / (total(squares) / arguments.size + arguments.eps) ** 0.5)


@device
def _weighted(form: Any, arguments: Any, value: Any, weight: int, begin: int, count: int) -> Any:
    """Numbers, divided by their root mean square, times the weights from number `begin` on."""
    if arguments.wide:
        return multiply(value, _load(_FLOAT32, weight + begin * 4, count))
    return multiply(rounded(form, value), _load(form, weight + begin * form.itemsize, count))


@device
def _post_scale(form: Any, arguments: Any, values: int) -> Any:
    squares = broadcast(0.0)
    for begin in range(0, arguments.size, 16):
        value = _load(form, values + begin * form.itemsize, arguments.size - begin)
        squares = multiply_add(value, value, squares)
    return _scale(arguments, squares)


@device
def _summand(form: Any, arguments: Any, value: Any, scale: Any, begin: int, count: int) -> Any:
    """What is added to the residual."""
    if arguments.post:
        scaled = multiply(value, scale)
        value = rounded(form, _weighted(form, arguments, scaled, arguments.post, begin, count))
    if arguments.factor != 1.0:
        value = rounded(form, multiply(value, broadcast(arguments.factor)))
    return value


@device
def _norm(form: Any, arguments: Any, values: int, skipped: int) -> None:
    """One vector, which begins `skipped` bytes after the first in everything but `values`."""
    size, itemsize = arguments.size, form.itemsize
    squares = scale = broadcast(0.0)
    if arguments.post:
        scale = _post_scale(form, arguments, values)
    for begin in range(0, size, 16):
        place, count = begin * itemsize, size - begin
        value = _load(form, values + place, count)
        if arguments.residual:
            value = _summand(form, arguments, value, scale, begin, count)
            other = _load(form, arguments.residual + skipped + place, count)
            value = rounded(form, add(value, other))
            _store(form, arguments.added + skipped + place, value, count)
        squares = multiply_add(value, value, squares)
    if arguments.weight == 0:
        return
    if arguments.residual:
        values = arguments.added + skipped
    scale = _scale(arguments, squares)
    for begin in range(0, size, 16):
        place, count = begin * itemsize, size - begin
        value = multiply(_load(form, values + place, count), scale)
        normed = _weighted(form, arguments, value, arguments.weight, begin, count)
        _store(form, arguments.output + skipped + place, normed, count)


@device
def gate_values(form: Any, gates: Any, values: Any, activation: int) -> Any:
    """Sixteen gates, activated (`layers.Activation`, as a number) and rounded, times their values.

    GELU by tanh is the gate times a sigmoid too: 1 + tanh(y) = 2 sigmoid(2 y).
    """
    power = negative(gates)
    if activation == 1:
        cubic = multiply_add(
            multiply(gates, gates), broadcast(_GELU_CUBIC), broadcast(_GELU_LINEAR)
        )
        power = multiply(power, cubic)
    elif activation == 2:
        gates = minimum(broadcast(CLAMP), gates)
        power = multiply(gates, broadcast(-CLAMP_SLOPE))
        values = maximum(broadcast(-CLAMP), minimum(broadcast(CLAMP), values))
        values = add(values, broadcast(1.0))
    return multiply(rounded(form, divide(gates, add(broadcast(1.0), exp(power)))), values)


@device
def _gate(form: Any, arguments: Any, row: int) -> None:
    size, itemsize = arguments.size, form.itemsize
    gates = arguments.gate_up + row * arguments.stride
    for begin in range(0, size, 16):
        place, count = begin * itemsize, size - begin
        gate = _load(form, gates + place, count)
        up = _load(form, gates + size * itemsize + place, count)
        output = arguments.output + row * size * itemsize + place
        _store(form, output, gate_values(form, gate, up, arguments.activation), count)


@device
def run_norm(form: Any, arguments: Any) -> None:
    """Takes rows until there are none left."""
    begin = next_task(arguments) * _ROWS_OF_A_TASK
    size = arguments.size * form.itemsize
    while begin < arguments.rows:
        for row in range(begin, min(begin + _ROWS_OF_A_TASK, arguments.rows)):
            for part in range(arguments.parts):
                values = arguments.values + row * arguments.stride + part * size
                _norm(form, arguments, values, (row * arguments.parts + part) * size)
        begin = next_task(arguments) * _ROWS_OF_A_TASK


@device
def _run_gate(form: Any, arguments: Any) -> None:
    begin = next_task(arguments) * _ROWS_OF_A_TASK
    while begin < arguments.rows:
        for row in range(begin, min(begin + _ROWS_OF_A_TASK, arguments.rows)):
            _gate(form, arguments, row)
        begin = next_task(arguments) * _ROWS_OF_A_TASK


@device
def run_quantize(form: Any, arguments: Any) -> None:
    """Takes rows until there are none left."""
    begin = next_task(arguments) * _ROWS_OF_A_TASK
    while begin < arguments.rows:
        for row in range(begin, min(begin + _ROWS_OF_A_TASK, arguments.rows)):
            source = arguments.values + row * arguments.stride
            target = arguments.output + row * arguments.output_stride
            for group in range(arguments.groups):
                place = source + group * GROUP * form.itemsize
                quantize_group(form, place, target + group * BLOCK_BYTES)
        begin = next_task(arguments) * _ROWS_OF_A_TASK


@functools.cache
def _norm_kernel(form: Format) -> Kernel:
    """The compiled norms for numbers in `form`."""

    def compiled_norm(pointer: Any) -> None:
        run_norm(form, carray(pointer, 1)[0])

    return Kernel(compiled_norm, NormArguments)


@functools.cache
def _gate_kernel(form: Format) -> Kernel:
    """The compiled activation for numbers in `form`."""

    def compiled_gate(pointer: Any) -> None:
        _run_gate(form, carray(pointer, 1)[0])

    return Kernel(compiled_gate, GateArguments)


@functools.cache
def _quantize_kernel(form: Format) -> Kernel:
    """The compiled quantization of numbers in `form`."""

    def compiled_quantize(pointer: Any) -> None:
        run_quantize(form, carray(pointer, 1)[0])

    return Kernel(compiled_quantize, QuantizeArguments)


def warm_up(dtype: torch.dtype) -> None:
    """Compiles what the functions below need for a dtype, or loads it."""
    if dtype in FORMATS:
        _norm_kernel(FORMATS[dtype])
        _gate_kernel(FORMATS[dtype])


def _dense(values: Tensor) -> bool:
    """Whether all dimensions but the first lie side by side."""
    inner = (values.shape[2], 1) if values.dim() == 3 else (1,)
    return values.dtype in FORMATS and values.stride()[1:] == inner


def _weights(values: Tensor, *weights: Tensor | None) -> bool:
    """Whether weights of norms have the dtype of the numbers, or float32."""
    dtypes = {weight.dtype for weight in weights if weight is not None}
    return len(dtypes) < 2 and dtypes <= {values.dtype, torch.float32}


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`, compiled for float32 and bfloat16."""
    if not (_dense(values) and _weights(values, weight)):
        return reference.rms_norm(values, weight, eps)
    output = torch.empty_like(values, memory_format=torch.contiguous_format)
    _norm_kernel(FORMATS[values.dtype])(
        threads_for(values.numel()),
        values.shape[0], values.shape[1] if values.dim() == 3 else 1, values.shape[-1],
        values.data_ptr(), values.stride(0) * values.element_size(),
        0, 0, weight.data_ptr(), output.data_ptr(), 0, weight.dtype != values.dtype, eps, 1.0,
    )  # fmt: skip
    return output


def add_rms_norm(
    values: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    post: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`, compiled for float32 and bfloat16."""
    if not (
        _dense(values)
        and residual.is_contiguous()
        and _weights(values, weight, post)
        and values.dtype == residual.dtype
    ):
        return reference.add_rms_norm(values, residual, weight, eps, post, factor)
    added = torch.empty_like(residual)
    output = added if weight is None else torch.empty_like(residual)
    wide = any(each is not None and each.dtype != values.dtype for each in (weight, post))
    _norm_kernel(FORMATS[values.dtype])(
        threads_for(values.numel()),
        values.shape[0], 1, values.shape[1],
        values.data_ptr(), values.stride(0) * values.element_size(),
        residual.data_ptr(), added.data_ptr(), address_of(weight),
        output.data_ptr(), address_of(post), wide, eps, factor,
    )  # fmt: skip
    return output, added


def gate_mul(gate_up: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    """`reference.gate_mul`, compiled for float32 and bfloat16."""
    if not _dense(gate_up):
        return reference.gate_mul(gate_up, activation)
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((rows, size))
    _gate_kernel(FORMATS[gate_up.dtype])(
        threads_for(gate_up.numel()),
        rows, size, gate_up.data_ptr(), gate_up.stride(0) * gate_up.element_size(),
        output.data_ptr(), activation.value,
    )  # fmt: skip
    return output


def quantized(values: Tensor) -> Tensor:
    """Rows as products with quantized matrices want them (`cpu_grouped`).

    Args:
        values: contiguous [rows, inputs], float32 or bfloat16, inputs in whole groups.

    Returns:
        uint8 [rows, inputs / GROUP * BLOCK_BYTES].
    """
    rows, groups = len(values), values.shape[1] // GROUP
    output = torch.empty((rows, groups * BLOCK_BYTES), dtype=torch.uint8)
    _quantize_kernel(FORMATS[values.dtype])(
        threads_for(values.numel()),
        rows, groups, values.data_ptr(), values.stride(0) * values.element_size(),
        output.data_ptr(), output.stride(0),
    )  # fmt: skip
    return output
