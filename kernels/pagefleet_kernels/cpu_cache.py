"""Keys and values into the pool on the CPU, with the rotary embedding on the way.

A token's heads are rotated and stored by whichever thread takes it: tokens never mix, so the batch
cannot change a bit. Products are taken and added in float32 and rounded once. Threads take
neighbouring tokens, because the keys of sixteen share the cache lines of a panel (`cpu_rows`).
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
from pagefleet_kernels.cpu_launch import FORMATS, Kernel, fields, next_tasks, threads_for
from pagefleet_kernels.cpu_rows import PANEL, WORD_BYTES
from pagefleet_kernels.cpu_simd import (
    copy_bytes,
    load_few,
    load_int32,
    load_int64,
    load_numbers,
    multiply,
    multiply_add,
    negative,
    store_few,
    store_int32,
    store_numbers,
    store_words,
)


class Arguments(ctypes.Structure):
    """What the functions below hand to the compiled code; strides are in bytes. `rotation` is 0
    where keys are stored as they come, and no query is touched.
    """

    _fields_ = fields(
        "tokens query query_stride rotated key key_stride value value_stride rotation positions "
        "keys values block_bytes slots query_heads heads head_size block_size"
    )


@device
def _rotate(form: Any, source: int, target: int, angles: int, half: int, panel: bool) -> None:
    """One head: dimension i turns with dimension i + `half` by its angle's cosine and sine. It goes
    to a row, or to a key's words in a `panel`.
    """
    for begin in range(0, half, 16):
        count = min(half - begin, 16)
        low, high = source + begin * form.itemsize, source + (begin + half) * form.itemsize
        cosine, sine = angles + begin * 4, angles + (begin + half) * 4
        if count == 16:
            first, second = load_numbers(form, low), load_numbers(form, high)
            cosines, sines = load_numbers(_FLOAT32, cosine), load_numbers(_FLOAT32, sine)
        else:
            first, second = load_few(form, low, count), load_few(form, high, count)
            cosines, sines = load_few(_FLOAT32, cosine, count), load_few(_FLOAT32, sine, count)
        turned_first = multiply_add(first, cosines, negative(multiply(second, sines)))
        turned_second = multiply_add(second, cosines, multiply(first, sines))
        if panel:
            left, right = (begin * form.itemsize * PANEL, (begin + half) * form.itemsize * PANEL)
            store_words(form, target + left, turned_first, count)
            store_words(form, target + right, turned_second, count)
        elif count == 16:
            store_numbers(form, target + begin * form.itemsize, turned_first)
            store_numbers(form, target + (begin + half) * form.itemsize, turned_second)
        else:
            store_few(form, target + begin * form.itemsize, turned_first, count)
            store_few(form, target + (begin + half) * form.itemsize, turned_second, count)


@device
def _copy_key(source: int, target: int, size: int) -> None:
    """A key as it comes to its words in a panel."""
    for place in range(0, size, WORD_BYTES):
        store_int32(target + place * PANEL, load_int32(source + place))


@device
def _write_token(form: Any, arguments: Any, token: int) -> None:
    size, half = arguments.head_size * form.itemsize, arguments.head_size // 2
    block, slot = divmod(load_int64(arguments.slots + token * 8), arguments.block_size)
    place, lane = block * arguments.block_bytes, slot % PANEL
    keys = arguments.keys + place + (slot - lane) * size + lane * WORD_BYTES
    values = arguments.values + place + slot * size
    key = arguments.key + token * arguments.key_stride
    value = arguments.value + token * arguments.value_stride
    angles = 0
    if arguments.rotation:
        position = load_int64(arguments.positions + token * 8)
        angles = arguments.rotation + position * arguments.head_size * 4
        query = arguments.query + token * arguments.query_stride
        rotated = arguments.rotated + token * arguments.query_heads * size
        for head in range(arguments.query_heads):
            _rotate(form, query + head * size, rotated + head * size, angles, half, False)
    for head in range(arguments.heads):
        skipped = head * arguments.block_size * size
        if angles:
            _rotate(form, key + head * size, keys + skipped, angles, half, True)
        else:
            _copy_key(key + head * size, keys + skipped, size)
        copy_bytes(values + skipped, value + head * size, size)


@device
def run_cache(form: Any, arguments: Any) -> None:
    """Takes tokens until there are none left."""
    begin, end = next_tasks(arguments, arguments.tokens)
    while begin < end:
        for token in range(begin, end):
            _write_token(form, arguments, token)
        begin, end = next_tasks(arguments, arguments.tokens)


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


def has_panels(dtype: torch.dtype, head_size: int) -> bool:
    """Whether the pool of a model keeps keys in panels, if its blocks hold whole ones."""
    return dtype in FORMATS and head_size % 8 == 0


def in_panels(cache: Tensor) -> bool:
    """Whether a cache [N, G, S, D] has its keys in panels (`cpu_rows`); if not, it is left to the
    reference, which knows rows only.
    """
    _, _, block_size, head_size = cache.shape
    return has_panels(cache.dtype, head_size) and block_size % PANEL == 0


def block_bytes(key_cache: Tensor, value_cache: Tensor) -> int:
    """From one block to the next in both caches.

    Raises:
        ValueError: a block does not lie in one piece, or the caches differ.
    """
    alike = (key_cache.shape, key_cache.stride()) == (value_cache.shape, value_cache.stride())
    if not (alike and key_cache[:1].is_contiguous()):
        raise ValueError("A block's keys, and as many values, must each lie in one piece.")
    return key_cache.stride(0) * key_cache.element_size()


def dense_heads(heads: Tensor) -> Tensor:
    """Heads [T, H, D] whose tokens lie in one piece each; copied if they don't."""
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """`reference.write_kv`, compiled, into caches that are `in_panels`."""
    if not in_panels(key_cache):
        reference.write_kv(key, value, key_cache, value_cache, slots)
        return
    key, value = dense_heads(key.to(key_cache.dtype)), dense_heads(value.to(key_cache.dtype))
    tokens, heads, head_size = key.shape
    itemsize = key.element_size()
    _kernel(FORMATS[key.dtype])(
        threads_for(key.numel()),
        tokens, 0, 0, 0,
        key.data_ptr(), key.stride(0) * itemsize, value.data_ptr(), value.stride(0) * itemsize,
        0, 0, key_cache.data_ptr(), value_cache.data_ptr(), block_bytes(key_cache, value_cache),
        slots.data_ptr(), 0, heads, head_size, key_cache.shape[2],
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
    """`reference.rotary_write_kv`, compiled, into caches that are `in_panels`."""
    if not in_panels(key_cache):
        return reference.rotary_write_kv(
            query, key, value, cos_sin, positions, key_cache, value_cache, slots
        )
    dtype = key_cache.dtype
    queries, key, value = (dense_heads(heads.to(dtype)) for heads in (query, key, value))
    tokens, heads, head_size = key.shape
    itemsize = key.element_size()
    rotated = torch.empty_like(queries, memory_format=torch.contiguous_format)
    _kernel(FORMATS[dtype])(
        threads_for(queries.numel()),
        tokens, queries.data_ptr(), queries.stride(0) * itemsize, rotated.data_ptr(),
        key.data_ptr(), key.stride(0) * itemsize, value.data_ptr(), value.stride(0) * itemsize,
        cos_sin.data_ptr(), positions.data_ptr(),
        key_cache.data_ptr(), value_cache.data_ptr(), block_bytes(key_cache, value_cache),
        slots.data_ptr(), queries.shape[1], heads, head_size, key_cache.shape[2],
    )  # fmt: skip
    return rotated.to(query.dtype)
