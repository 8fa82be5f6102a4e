"""Keys and values into the pool on the CPU, with the rotary embedding on the way.

A token's heads are rotated and stored by whichever thread takes it: tokens never mix, so the batch
cannot change a bit. Products are taken and added in float32 and rounded once; to be kept as e4m3,
what comes of that is divided by its head's scale and rounded again. Threads take neighbouring
tokens, because the keys of sixteen share the cache lines of a panel (`cpu_rows`).
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
from pagefleet_kernels.cpu_launch import (
    FORMATS,
    KEPT,
    Kernel,
    address_of,
    fields,
    next_tasks,
    threads_for,
)
from pagefleet_kernels.cpu_rows import PANEL, VECTOR_BYTES, WORD_BYTES
from pagefleet_kernels.cpu_simd import (
    broadcast,
    copy_bytes,
    divide,
    load_few,
    load_float,
    load_int32,
    load_int64,
    load_numbers,
    multiply,
    multiply_add,
    negative,
    rounded,
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
        "keys values block_bytes kv_scales slots query_heads heads head_size block_size"
    )


@device
def _load(form: Any, address: int, count: int) -> Any:
    return load_numbers(form, address) if count == 16 else load_few(form, address, count)


@device
def _store(
    form: Any,
    kept: Any,
    target: int,
    begin: int,
    numbers: Any,
    count: int,
    panel: bool,
    scale: float,
) -> None:
    """The `count` numbers of a row from number `begin` on, to its place or its words in a `panel`;
    rounded to `form`, and over the scale if they are kept in 8 bits.
    """
    if kept.itemsize < form.itemsize:
        numbers = divide(rounded(form, numbers), broadcast(scale))
    if panel:
        store_words(kept, target + begin * kept.itemsize * PANEL, numbers, count)
    elif count == 16:
        store_numbers(kept, target + begin * kept.itemsize, numbers)
    else:
        store_few(kept, target + begin * kept.itemsize, numbers, count)


@device
def rotate(
    form: Any,
    kept: Any,
    source: int,
    target: int,
    angles: int,
    half: int,
    panel: bool,
    scale: float,
) -> None:
    """One head: dimension i turns with dimension i + `half` by its angle's cosine and sine; for
    where it goes see `_store`.
    """
    for begin in range(0, half, 16):
        count = min(half - begin, 16)
        first = _load(form, source + begin * form.itemsize, count)
        second = _load(form, source + (begin + half) * form.itemsize, count)
        cosines = _load(_FLOAT32, angles + begin * 4, count)
        sines = _load(_FLOAT32, angles + (begin + half) * 4, count)
        turned_first = multiply_add(first, cosines, negative(multiply(second, sines)))
        turned_second = multiply_add(second, cosines, multiply(first, sines))
        _store(form, kept, target, begin, turned_first, count, panel, scale)
        _store(form, kept, target, begin + half, turned_second, count, panel, scale)


@device
def _copy_key(source: int, target: int, size: int) -> None:
    """A key as it comes to its words in a panel."""
    for place in range(0, size, WORD_BYTES):
        store_int32(target + place * PANEL, load_int32(source + place))


@device
def _narrow(
    form: Any, kept: Any, source: int, target: int, size: int, panel: bool, scale: float
) -> None:
    """A key or value as it comes, to be kept in 8 bits."""
    for begin in range(0, size, 16):
        count = min(size - begin, 16)
        numbers = _load(form, source + begin * form.itemsize, count)
        _store(form, kept, target, begin, numbers, count, panel, scale)


@device
def _write_token(form: Any, kept: Any, arguments: Any, token: int) -> None:
    size, half = arguments.head_size * form.itemsize, arguments.head_size // 2
    kept_size, narrow = arguments.head_size * kept.itemsize, kept.itemsize < form.itemsize
    block, slot = divmod(load_int64(arguments.slots + token * 8), arguments.block_size)
    place, lane = block * arguments.block_bytes, slot % PANEL
    keys = arguments.keys + place + (slot - lane) * kept_size + lane * WORD_BYTES
    values = arguments.values + place + slot * kept_size
    key = arguments.key + token * arguments.key_stride
    value = arguments.value + token * arguments.value_stride
    angles, key_scale, value_scale = 0, 1.0, 1.0
    if arguments.rotation:
        position = load_int64(arguments.positions + token * 8)
        angles = arguments.rotation + position * arguments.head_size * 4
        query = arguments.query + token * arguments.query_stride
        rotated = arguments.rotated + token * arguments.query_heads * size
        for head in range(arguments.query_heads):
            skipped = head * size
            rotate(form, form, query + skipped, rotated + skipped, angles, half, False, 1.0)
    for head in range(arguments.heads):
        skipped = head * arguments.block_size * kept_size
        if narrow:
            scale = arguments.kv_scales + head * 4
            key_scale, value_scale = load_float(scale), load_float(scale + arguments.heads * 4)
        if angles:
            rotate(form, kept, key + head * size, keys + skipped, angles, half, True, key_scale)
        elif narrow:
            numbers = arguments.head_size
            _narrow(form, kept, key + head * size, keys + skipped, numbers, True, key_scale)
        else:
            _copy_key(key + head * size, keys + skipped, size)
        if narrow:
            numbers = arguments.head_size
            _narrow(form, kept, value + head * size, values + skipped, numbers, False, value_scale)
        else:
            copy_bytes(values + skipped, value + head * size, size)


@device
def run_cache(form: Any, kept: Any, arguments: Any) -> None:
    """Takes tokens until there are none left."""
    begin, end = next_tasks(arguments, arguments.tokens)
    while begin < end:
        for token in range(begin, end):
            _write_token(form, kept, arguments, token)
        begin, end = next_tasks(arguments, arguments.tokens)


_FLOAT32 = Format.FLOAT32


@functools.cache
def _kernel(form: Format, kept: Format) -> Kernel:
    """The compiled kernel for numbers in `form` that are kept in `kept`."""

    def cache_kernel(pointer: Any) -> None:
        run_cache(form, kept, carray(pointer, 1)[0])

    return Kernel(cache_kernel, Arguments)


def warm_up(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Compiles what the functions below need for a dtype and that of the pool, or loads it."""
    if kv_dtype in KEPT:
        _kernel(FORMATS[computed_in(dtype, kv_dtype)], KEPT[kv_dtype])


def computed_in(dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.dtype:
    """What queries and keys of `dtype` are rounded to first, beside a pool of `kv_dtype`: its own
    type, or if that has 8 bits a type that kernels are compiled for.
    """
    if kv_dtype in FORMATS:
        return kv_dtype
    return dtype if dtype in FORMATS else torch.float32


def is_kept(dtype: torch.dtype, head_size: int, latent: int = 0) -> bool:
    """Whether kernels are compiled for a pool of `dtype`, if its blocks hold whole panels; for
    `latent` see `cpu_rows.Block`.
    """
    if latent:
        whole = head_size * dtype.itemsize % VECTOR_BYTES == 0 and latent % 8 == 0
        return dtype in FORMATS and whole
    return dtype in KEPT and head_size % 8 == 0


def latent_of(key_cache: Tensor, value_cache: Tensor) -> int:
    """How many numbers of a key are its value, if the caches are one; 0 if they are two."""
    one = key_cache.data_ptr() == value_cache.data_ptr()
    return value_cache.shape[3] if one and value_cache.shape[3] < key_cache.shape[3] else 0


def in_panels(cache: Tensor, latent: int = 0) -> bool:
    """Whether a cache [N, G, S, D] has its keys in panels, or latents as the kernels want them
    (`cpu_rows`); if not, it is left to the reference, which knows rows only.
    """
    _, _, block_size, head_size = cache.shape
    return is_kept(cache.dtype, head_size, latent) and block_size % PANEL == 0


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
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """`reference.write_kv`, compiled, into caches that are `in_panels`."""
    if not in_panels(key_cache):
        reference.write_kv(key, value, key_cache, value_cache, slots, kv_scales)
        return
    dtype = computed_in(key.dtype, key_cache.dtype)
    key, value = (dense_heads(heads.to(dtype)) for heads in (key, value))
    tokens, heads, head_size = key.shape
    itemsize = key.element_size()
    _kernel(FORMATS[dtype], KEPT[key_cache.dtype])(
        threads_for(key.numel()),
        tokens, 0, 0, 0,
        key.data_ptr(), key.stride(0) * itemsize, value.data_ptr(), value.stride(0) * itemsize,
        0, 0, key_cache.data_ptr(), value_cache.data_ptr(), block_bytes(key_cache, value_cache),
        address_of(kv_scales), slots.data_ptr(), 0, heads, head_size, key_cache.shape[2],
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
    kv_scales: Tensor | None = None,
) -> Tensor:
    """`reference.rotary_write_kv`, compiled, into caches that are `in_panels`."""
    if not in_panels(key_cache):
        return reference.rotary_write_kv(
            query, key, value, cos_sin, positions, key_cache, value_cache, slots, kv_scales
        )
    dtype = computed_in(query.dtype, key_cache.dtype)
    queries, key, value = (dense_heads(heads.to(dtype)) for heads in (query, key, value))
    tokens, heads, head_size = key.shape
    itemsize = key.element_size()
    rotated = torch.empty_like(queries, memory_format=torch.contiguous_format)
    _kernel(FORMATS[dtype], KEPT[key_cache.dtype])(
        threads_for(queries.numel()),
        tokens, queries.data_ptr(), queries.stride(0) * itemsize, rotated.data_ptr(),
        key.data_ptr(), key.stride(0) * itemsize, value.data_ptr(), value.stride(0) * itemsize,
        cos_sin.data_ptr(), positions.data_ptr(),
        key_cache.data_ptr(), value_cache.data_ptr(), block_bytes(key_cache, value_cache),
        address_of(kv_scales), slots.data_ptr(), queries.shape[1], heads, head_size,
        key_cache.shape[2],
    )  # fmt: skip
    return rotated.to(query.dtype)
