"""Attention over paged keys and values, how they are written, and copies of blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks.correctness.comparison import ROUNDING, Check, Inputs, error_of
from pagefleet_kernels import reference
from pagefleet_kernels.triton_attention import attention
from pagefleet_kernels.triton_cache import copy_blocks, rotary_write_kv, write_kv
from pagefleet_kernels.triton_latents import product_by_heads, rotary_write_latents
from pagefleet_kernels.triton_tiling import chip_of, choose_tiling

Rows: TypeAlias = Sequence[tuple[int, int]]
"""(position of the first new token, new tokens) of each row."""

DECODE: Rows = [(0, 1), (15, 1), (16, 1), (63, 1), (200, 1), (1030, 1)]
PREFILL: Rows = [(0, 1), (0, 17), (0, 150)]
MIXED: Rows = [(31, 1), (40, 33), (0, 5), (700, 1), (5, 0), (128, 64)]
LONG: Rows = [*MIXED, (2100, 3), (1020, 8)]

_LLAMA = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16}
_SMALL = {"heads": 4, "kv_heads": 2, "head_size": 64, "block_size": 16}


def quick(inputs: Inputs) -> Iterator[partial[Check]]:
    """A few seconds in the interpreter."""
    for rows in (DECODE[:4], MIXED[:3]):
        yield partial(_attention, inputs, rows, torch.float32, _SMALL)
    yield partial(_eight_bits, inputs, MIXED[:3], torch.float32, _SMALL)
    yield partial(_latents, inputs, MIXED[:3], torch.float32, 5, 48, 16)
    yield partial(_writes, inputs, torch.float32, 4, 2, 64)
    yield partial(_latent_layers, inputs, torch.float32, 5, 48, 16)
    yield partial(_copies, inputs, torch.bfloat16)


def full(inputs: Inputs) -> Iterator[partial[Check]]:
    """The shapes of models that are served, and their borders."""
    bfloat16, float16 = torch.bfloat16, torch.float16
    for rows in (DECODE, PREFILL, MIXED):
        yield partial(_attention, inputs, rows, bfloat16, _LLAMA)
        yield partial(_attention, inputs, rows, float16, _LLAMA | {"block_size": 32})
    for rows in (DECODE, MIXED):
        yield partial(_eight_bits, inputs, rows, bfloat16, _LLAMA)
    for options in ({"window": 100}, {"softcap": 30.0}, {"invariant": True}):
        for rows in (DECODE, MIXED):
            yield partial(_attention, inputs, rows, bfloat16, _LLAMA, **options)
    yield partial(_invariant_attention, inputs, bfloat16, _LLAMA)
    slopes = torch.linspace(0.01, 0.5, 32, device=inputs.device)
    yield partial(_attention, inputs, MIXED, bfloat16, _LLAMA, slopes=slopes)
    for rows in (DECODE, MIXED):
        yield partial(_attention, inputs, rows, bfloat16, _LLAMA, window=100, sinks=8 * slopes)
    yield partial(_attention, inputs, MIXED, torch.float32, _SMALL)
    for size, block_size in ((64, 64), (80, 16), (96, 32), (256, 16)):
        shape = {"heads": 8, "kv_heads": 2, "head_size": size, "block_size": block_size}
        for rows in (DECODE, MIXED):
            yield partial(_attention, inputs, rows, bfloat16, shape)
    for rows in (DECODE, MIXED):
        yield partial(_latents, inputs, rows, bfloat16, 128, 512, 64)
        yield partial(_latents, inputs, rows, bfloat16, 16, 512, 64, invariant=True)
        yield partial(_latents, inputs, rows, torch.float32, 16, 512, 64)
    for dtype in (bfloat16, torch.float32):
        yield partial(_latent_layers, inputs, dtype, 128, 512, 64)
        yield partial(_writes, inputs, dtype, 32, 8, 128)
        yield partial(_writes, inputs, dtype, 4, 4, 80)
    yield partial(_copies, inputs, bfloat16)


def attention_inputs(
    inputs: Inputs,
    rows: Rows,
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """The arguments of `attention`: query, caches, tables, starts, offsets."""
    needed = [-(-(start + count) // block_size) for start, count in rows]
    blocks = inputs.permutation(sum(needed) + 2).to(torch.int32)
    caches = inputs.poisoned(2, len(blocks), kv_heads, block_size, head_size, dtype=dtype)
    tables = torch.zeros(len(rows), max(needed) + 1, dtype=torch.int32, device=inputs.device)
    first = 0
    for table, length, (start, count) in zip(tables, needed, rows, strict=True):
        table[:length] = blocks[first : first + length]
        first += length
        positions = torch.arange(start + count, device=inputs.device)
        block, within = table[positions // block_size].long(), positions % block_size
        for cache in caches:
            cache[block, :, within] = inputs.normal(start + count, kv_heads, head_size, dtype=dtype)
    counts = [count for _, count in rows]
    return (
        inputs.normal(sum(counts), heads, head_size, dtype=dtype),
        caches[0],
        caches[1],
        tables,
        inputs.integers(*(start for start, _ in rows)),
        torch.tensor([0, *counts], device=inputs.device).cumsum(0).to(torch.int32),
    )


def _attention(
    inputs: Inputs, rows: Rows, dtype: torch.dtype, shape: dict[str, int], **options: Any
) -> Check:
    arguments = attention_inputs(inputs, rows, dtype=dtype, **shape)
    options = {"scale": shape["head_size"] ** -0.5, **options}
    found = attention(*arguments, **options)
    options.pop("invariant", None)
    query, keys, values, *rest = arguments
    expected = reference.attention(query.double(), keys.double(), values.double(), *rest, **options)
    case = f"{shape['heads']}/{shape['kv_heads']} x {shape['head_size']}, {len(query)} tokens"
    return Check("attention", case, error_of(found, expected), ROUNDING[dtype])


def _latents(
    inputs: Inputs,
    rows: Rows,
    dtype: torch.dtype,
    heads: int,
    rank: int,
    turned: int,
    **options: Any,
) -> Check:
    shape = {"heads": heads, "kv_heads": 1, "head_size": rank + turned, "block_size": 16}
    query, cache, _, *rest = attention_inputs(inputs, rows, dtype=dtype, **shape)
    found = attention(query, cache, cache[..., :rank], *rest, scale=0.05, **options)
    exact = cache.double()
    expected = reference.attention(query.double(), exact, exact[..., :rank], *rest, scale=0.05)
    case = f"latents, {heads} x {rank} + {turned}, {len(query)} tokens"
    return Check("attention", case, error_of(found, expected), ROUNDING[dtype])


def _latent_layers(inputs: Inputs, dtype: torch.dtype, heads: int, rank: int, turned: int) -> Check:
    """`rotary_write_latents`: what is stored, and that nothing else is; and `product_by_heads`."""
    tokens, size = 37, 2 * turned
    query = inputs.normal(tokens, heads, size + turned, dtype=dtype)
    entry = inputs.normal(tokens, rank + turned, dtype=dtype)
    latent, key = torch.split(entry, [rank, turned], 1)
    slots, positions = inputs.permutation(9 * 16)[:tokens], inputs.permutation(200)[:tokens]
    angles = inputs.normal(200, turned // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    cache = inputs.poisoned(9, 1, 16, rank + turned, dtype=dtype)
    wide = cache.double()
    rotated = rotary_write_latents(query, latent, key, cos_sin, positions, cache, slots)
    given = query.double(), latent.double(), key.double(), cos_sin.double(), positions
    expected = reference.rotary_write_latents(*given, wide, slots)
    weights = inputs.normal(heads, rank, size + turned, dtype=dtype) / (size + turned) ** 0.5
    products = reference.by_heads(weights.double())(query.double())
    error = max(
        error_of(rotated, expected),
        error_of(cache, wide),
        error_of(product_by_heads(query, weights), products),
    )
    case = f"{heads} x {rank} + {turned}"
    return Check("rotary_write_latents, product_by_heads", case, error, ROUNDING[dtype])


def _invariant_attention(inputs: Inputs, dtype: torch.dtype, shape: dict[str, int]) -> Check:
    """Each row alone, which is split, against all rows together, which are not."""
    query, keys, values, tables, starts, offsets = attention_inputs(
        inputs, LONG, dtype=dtype, **shape
    )
    options: dict[str, Any] = {"scale": shape["head_size"] ** -0.5, "invariant": True}
    tiling = choose_tiling(query, keys, tables, chip_of(inputs.device), invariant=True)
    serial = replace(tiling, splits=1)
    together = attention(query, keys, values, tables, starts, offsets, tiling=serial, **options)
    alone = torch.empty_like(together)
    for row in range(len(starts)):
        first, last = offsets[row : row + 2].tolist()
        for token in range(first, last):
            start = starts[row : row + 1] + (token - first)
            one = query[token : token + 1], keys, values, tables[row : row + 1], start
            alone[token : token + 1] = attention(*one, inputs.integers(0, 1), **options)
    return Check("attention", "a row alone or in a batch", error_of(together, alone), 0.0)


def _eight_bits(inputs: Inputs, rows: Rows, dtype: torch.dtype, shape: dict[str, int]) -> Check:
    """Attention over caches of e4m3, and how many of the codes that `write_kv` stores differ."""
    query, keys, values, *rest = attention_inputs(inputs, rows, dtype=dtype, **shape)
    kv_heads, block_size = shape["kv_heads"], shape["block_size"]
    scales = 2.0 ** inputs.permutation(2 * kv_heads).view(2, kv_heads).float() / 32
    found = torch.full((2, *keys.shape), 0x7F, dtype=torch.uint8, device=inputs.device)
    expected = found.clone()
    slots = torch.arange(len(keys) * block_size, device=inputs.device)
    lines = [each.transpose(1, 2).reshape(-1, *each.shape[1::2]) for each in (keys, values)]
    write_kv(lines[0], lines[1], found[0], found[1], slots, scales)
    wide = [each.double() for each in lines]
    reference.write_kv(wide[0], wide[1], expected[0], expected[1], slots, scales)
    options: dict[str, Any] = {"scale": shape["head_size"] ** -0.5, "kv_scales": scales}
    exact = reference.attention(query.double(), expected[0], expected[1], *rest, **options)
    error = error_of(attention(query, expected[0], expected[1], *rest, **options), exact)
    case = f"e4m3, {shape['heads']}/{kv_heads} x {shape['head_size']}, {len(query)} tokens"
    same = torch.equal(found, expected)
    return Check("write_kv, attention", case, error if same else torch.inf, ROUNDING[dtype])


def _writes(inputs: Inputs, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> Check:
    """`write_kv` and `rotary_write_kv`: what is stored, and that nothing else is."""
    tokens, blocks, block_size = 37, 9, 16
    fused = inputs.normal(tokens, heads + 2 * kv_heads, size, dtype=dtype)
    query, key, value = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
    slots = inputs.permutation(blocks * block_size)[:tokens]
    positions = inputs.permutation(200)[:tokens]
    angles = inputs.normal(200, size // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    pool = inputs.poisoned(2, 2, blocks, kv_heads, block_size, size, dtype=dtype)
    expected = pool.double()
    write_kv(key, value, pool[0, 0], pool[0, 1], slots)
    wide = query.double(), key.double(), value.double()
    reference.write_kv(wide[1], wide[2], expected[0, 0], expected[0, 1], slots)
    places = positions, pool[1, 0], pool[1, 1], slots
    turned = rotary_write_kv(query, key, value, cos_sin, *places)
    places = positions, expected[1, 0], expected[1, 1], slots
    rotated = reference.rotary_write_kv(*wide, cos_sin.double(), *places)
    error = max(error_of(turned, rotated), error_of(pool, expected))
    return Check(
        "write_kv, rotary_write_kv", f"{heads}/{kv_heads} x {size}", error, ROUNDING[dtype]
    )


def _copies(inputs: Inputs, dtype: torch.dtype) -> Check:
    caches = inputs.normal(3, 2, 40, 8, 16, 128, dtype=dtype)
    blocks = inputs.permutation(40)
    pairs = torch.stack((blocks[:12], blocks[12:24]), dim=1)
    expected = caches.clone()
    reference.copy_blocks(expected, pairs)
    copy_blocks(caches, pairs)
    return Check("copy_blocks", "12 of 40 blocks", error_of(caches, expected), 0.0)
