"""Keys and values into the pool on the CPU, with the rotary embedding on the way.

A token's heads are rotated and stored by whichever thread takes it: tokens never mix, so the batch
cannot change a bit. Products are taken and added in float32 and rounded once.
"""

import ctypes
import functools
from typing import Any

import torch
from numba import carray
from torch import Tensor

from pagefleet_kernels import reference
from pagefleet_kernels.cpu_ir import (
    Format,
    device,
)
from pagefleet_kernels.cpu_launch import FORMATS, Kernel, fields, next_task, threads_for
from pagefleet_kernels.cpu_simd import (
    copy_bytes,
    load_few,
    load_int64,
    load_numbers,
    multiply,
    multiply_add,
    negative,
    store_few,
    store_numbers,
)


class Arguments(ctypes.Structure):
    """What the functions below hand to the compiled code; strides are in bytes. `rotation` is 0
    where keys are stored as they come, and no query is touched.
    """

    _fields_ = fields(
        "tokens query query_stride rotated key key_stride value value_stride rotation positions "
        "keys values slots query_heads heads head_size block_size"
    )


@device
def _rotate(form: Any, source: int, target: int, angles: int, half: int) -> None:
    """One head: dimension i turns with dimension i + `half` by its angle's cosine and sine."""
    for begin in range(0, half, 16):
        count = min(half - begin, 16)
        low, high = source + begin * form.itemsize, source + (begin + half) * form.itemsize
        left, right = target + begin * form.itemsize, target + (begin + half) * form.itemsize
        cosine, sine = angles + begin * 4, angles + (begin + half) * 4
        if count == 16:
            first, second = load_numbers(form, low), load_numbers(form, high)
            cosines, sines = load_numbers(_FLOAT32, cosine), load_numbers(_FLOAT32, sine)
        else:
            first, second = load_few(form, low, count), load_few(form, high, count)
            cosines, sines = load_few(_FLOAT32, cosine, count), load_few(_FLOAT32, sine, count)
        turned_first = multiply_add(first, cosines, negative(multiply(second, sines)))
        turned_second = multiply_add(second, cosines, multiply(first, sines))
        if count == 16:
            store_numbers(form, left, turned_first)
            store_numbers(form, right, turned_second)
        else:
            store_few(form, left, turned_first, count)
            store_few(form, right, turned_second, count)


@device
def _write_token(form: Any, arguments: Any, token: int) -> None:
    size, half = arguments.head_size * form.itemsize, arguments.head_size // 2
    block, slot = divmod(load_int64(arguments.slots + token * 8), arguments.block_size)
    place = (block * arguments.heads * arguments.block_size + slot) * size
    key = arguments.key + token * arguments.key_stride
    value = arguments.value + token * arguments.value_stride
    angles = 0
    if arguments.rotation:
        position = load_int64(arguments.positions + token * 8)
        angles = arguments.rotation + position * arguments.head_size * 4
        query = arguments.query + token * arguments.query_stride
        rotated = arguments.rotated + token * arguments.query_heads * size
        for head in range(arguments.query_heads):
            _rotate(form, query + head * size, rotated + head * size, angles, half)
    for head in range(arguments.heads):
        skipped = place + head * arguments.block_size * size
        if angles:
            _rotate(form, key + head * size, arguments.keys + skipped, angles, half)
        else:
            copy_bytes(arguments.keys + skipped, key + head * size, size)
        copy_bytes(arguments.values + skipped, value + head * size, size)


@device
def run_cache(form: Any, arguments: Any) -> None:
    """Takes tokens until there are none left."""
    token = next_task(arguments)
    while token < arguments.tokens:
        _write_token(form, arguments, token)
        token = next_task(arguments)


_FLOAT32 = Format.FLOAT32


@functools.cache
def _kernel(form: Format) -> Kernel:
    """The compiled kernel for numbers in `form`."""

    def cache_kernel(pointer: Any) -> None:
        run_cache(form, carray(pointer, 1)[0])

    return Kernel(cache_kernel, Arguments)


def warm_up(dtype: torch.dtype) -> None:
    """Compiles what the functions below need for a dtype, or loads it."""
    if dtype in FORMATS:
        _kernel(FORMATS[dtype])


def _dense_heads(heads: Tensor, cache: Tensor) -> bool:
    return heads.dtype == cache.dtype and heads.stride()[1:] == (heads.shape[2], 1)


def _supported(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    return (
        key_cache.dtype in FORMATS
        and _dense_heads(key, key_cache)
        and _dense_heads(value, value_cache)
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
    )


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """`reference.write_kv`, compiled; a change of type on the way goes to the reference."""
    if not _supported(key, value, key_cache, value_cache):
        reference.write_kv(key, value, key_cache, value_cache, slots)
        return
    tokens, heads, head_size = key.shape
    itemsize = key.element_size()
    _kernel(FORMATS[key.dtype])(
        threads_for(key.numel()),
        tokens, 0, 0, 0,
        key.data_ptr(), key.stride(0) * itemsize, value.data_ptr(), value.stride(0) * itemsize,
        0, 0, key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(),
        0, heads, head_size, key_cache.shape[2],
    )  # fmt: skip


def rotary_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """`reference.rotary_write_kv`, compiled; a change of type on the way goes to the reference."""
    if not (
        _supported(key, value, key_cache, value_cache)
        and _dense_heads(query, key_cache)
        and cos_sin.dtype == torch.float32
        and cos_sin.is_contiguous()
        and positions.dtype == torch.int64
    ):
        return reference.rotary_write_kv(
            query, key, value, cos_sin, positions, key_cache, value_cache, slots
        )
    tokens, heads, head_size = key.shape
    itemsize = key.element_size()
    rotated = torch.empty_like(query, memory_format=torch.contiguous_format)
    _kernel(FORMATS[key.dtype])(
        threads_for(query.numel()),
        tokens, query.data_ptr(), query.stride(0) * itemsize, rotated.data_ptr(),
        key.data_ptr(), key.stride(0) * itemsize, value.data_ptr(), value.stride(0) * itemsize,
        cos_sin.data_ptr(), positions.data_ptr(),
        key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(),
        query.shape[1], heads, head_size, key_cache.shape[2],
    )  # fmt: skip
    return rotated
