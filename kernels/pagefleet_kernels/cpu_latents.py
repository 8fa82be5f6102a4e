"""Latents into the pool on the CPU, with the rotary embedding of what stands behind them.

A token is written by whichever thread takes it: tokens never mix, so the batch cannot change a bit.
"""

import ctypes
import functools
from typing import Any

import torch
from numba import carray
from torch import Tensor

from pagefleet_kernels import reference
from pagefleet_kernels.cpu_cache import block_bytes, dense_heads, in_panels, rotate
from pagefleet_kernels.cpu_ir import Format, device
from pagefleet_kernels.cpu_launch import FORMATS, Kernel, fields, next_tasks, threads_for
from pagefleet_kernels.cpu_simd import copy_bytes, load_int64


class Arguments(ctypes.Structure):
    """What `rotary_write_latents` hands to the compiled code; strides are in bytes, sizes in
    numbers.
    """

    _fields_ = fields(
        "tokens query query_stride rotated latent latent_stride key key_stride rotation positions "
        "cache block_bytes slots query_heads query_size latent_size key_size block_size"
    )


@device
def _write_token(form: Any, arguments: Any, token: int) -> None:
    turned, size = arguments.key_size, arguments.query_size * form.itemsize
    position = load_int64(arguments.positions + token * 8)
    angles = arguments.rotation + position * turned * 4
    block, slot = divmod(load_int64(arguments.slots + token * 8), arguments.block_size)
    still = arguments.latent_size * form.itemsize
    entry = still + turned * form.itemsize
    target = arguments.cache + block * arguments.block_bytes + slot * entry
    copy_bytes(target, arguments.latent + token * arguments.latent_stride, still)
    key = arguments.key + token * arguments.key_stride
    rotate(form, form, key, target + still, angles, turned // 2, False, 1.0)
    still = size - turned * form.itemsize
    for head in range(arguments.query_heads):
        source = arguments.query + token * arguments.query_stride + head * size
        target = arguments.rotated + (token * arguments.query_heads + head) * size
        copy_bytes(target, source, still)
        rotate(form, form, source + still, target + still, angles, turned // 2, False, 1.0)


@device
def run_latents(form: Any, arguments: Any) -> None:
    """Takes tokens until there are none left."""
    begin, end = next_tasks(arguments, arguments.tokens)
    while begin < end:
        for token in range(begin, end):
            _write_token(form, arguments, token)
        begin, end = next_tasks(arguments, arguments.tokens)


@functools.cache
def _kernel(form: Format) -> Kernel:
    """The compiled kernel for numbers in `form`."""

    def latents_kernel(pointer: Any) -> None:
        run_latents(form, carray(pointer, 1)[0])

    return Kernel(latents_kernel, Arguments)


def warm_up(dtype: torch.dtype) -> None:
    """Compiles what `rotary_write_latents` needs for a dtype, or loads it."""
    if dtype in FORMATS:
        _kernel(FORMATS[dtype])


def rotary_write_latents(
    query: Tensor,
    latent: Tensor,
    key: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """`reference.rotary_write_latents`, compiled, into caches of the type of the queries that the
    kernels can read.
    """
    if query.dtype is not cache.dtype or not in_panels(cache, latent.shape[1]):
        return reference.rotary_write_latents(query, latent, key, cos_sin, positions, cache, slots)
    query, itemsize = dense_heads(query), query.element_size()
    latent, key = (each if each.stride(1) == 1 else each.contiguous() for each in (latent, key))
    tokens, heads, size = query.shape
    rotated = torch.empty_like(query, memory_format=torch.contiguous_format)
    _kernel(FORMATS[query.dtype])(
        threads_for(query.numel()),
        tokens, query.data_ptr(), query.stride(0) * itemsize, rotated.data_ptr(),
        latent.data_ptr(), latent.stride(0) * itemsize, key.data_ptr(), key.stride(0) * itemsize,
        cos_sin.data_ptr(), positions.data_ptr(), cache.data_ptr(), block_bytes(cache, cache),
        slots.data_ptr(), heads, size, latent.shape[1], key.shape[1], cache.shape[2],
    )  # fmt: skip
    return rotated
