"""Writes into the paged pool on GPUs, in Triton: a step's keys and values, and copies of blocks.

A program takes one token with all its heads; its slot is read on the device, so the host never
waits. Rotary embedding (Su et al., RoFormer, 2021) is fused into the write: a rotated key goes to
the pool and nowhere else. A pool of uint8 holds e4m3 (`triton_fp8`), each head over a scale of its
own.
"""

import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.triton_fp8 import encode
from pagefleet_kernels.triton_jit import jit, jit_once_for
from pagefleet_kernels.triton_tiling import Chip, chip_of

_COPY_TILE = 2048

_WIDE_TOKEN = 2048
"""Numbers of a token's queries beyond which a program gets more warps."""


@jit
def _stored(
    values: tl.tensor,
    scales: tl.tensor,
    heads: tl.tensor,
    mask: tl.tensor,
    TYPE: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Values of the heads as a cache of that type holds them."""
    if tl.uint8 == TYPE:
        scale = tl.load(scales + heads, mask=mask, other=1.0)
        stored = encode(tl.div_rn(values.to(tl.float32), scale), NATIVE)
    else:
        stored = values.to(TYPE)
    return stored


@jit
def _load_heads(
    source: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_LINES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
) -> tl.tensor:
    """A token's heads, [HEADS, HEAD_SIZE]."""
    heads = tl.arange(0, HEAD_LINES)[:, None]
    dims = tl.arange(0, HEAD_TILE)[None, :]
    mask = (heads < HEADS) & (dims < HEAD_SIZE)
    return tl.load(source + heads * HEAD_SIZE + dims, mask=mask)


@jit
def _store_heads(
    values: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    slot: tl.tensor,
    block_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_LINES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """Store a token's heads in its slot of a cache."""
    heads = tl.arange(0, HEAD_LINES)[:, None]
    dims = tl.arange(0, HEAD_TILE)[None, :]
    mask = (heads < HEADS) & (dims < HEAD_SIZE)
    line = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * HEAD_SIZE
    places = cache + line + heads * (BLOCK_SIZE * HEAD_SIZE) + dims
    stored = _stored(values, scales, heads, heads < HEADS, cache.dtype.element_ty, NATIVE)
    tl.store(places, stored, mask=mask)


@jit
def _rotated(
    source: tl.tensor,
    turns: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_LINES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A token's heads, turned: their first halves and their second ones."""
    HALF: tl.constexpr = HEAD_SIZE // 2
    heads = tl.arange(0, HEAD_LINES)[:, None]
    dims = tl.arange(0, HALF_TILE)[None, :]
    mask = (heads < HEADS) & (dims < HALF)
    cosines = tl.load(turns + dims, mask=dims < HALF)
    sines = tl.load(turns + HALF + dims, mask=dims < HALF)
    halves = source + heads * HEAD_SIZE + dims
    first = tl.load(halves, mask=mask).to(tl.float32)
    second = tl.load(halves + HALF, mask=mask).to(tl.float32)
    TYPE: tl.constexpr = source.dtype.element_ty
    turned_first = (first * cosines - second * sines).to(TYPE)
    return turned_first, (second * cosines + first * sines).to(TYPE)


@jit
def _store_halves(
    first: tl.tensor,
    second: tl.tensor,
    target: tl.tensor,
    head_stride: tl.tensor,
    scales: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_LINES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF_TILE: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """Store what `_rotated` gave at `target`, heads `head_stride` apart."""
    HALF: tl.constexpr = HEAD_SIZE // 2
    heads = tl.arange(0, HEAD_LINES)[:, None]
    dims = tl.arange(0, HALF_TILE)[None, :]
    there = heads < HEADS
    mask = there & (dims < HALF)
    places = target + heads * head_stride + dims
    KIND: tl.constexpr = target.dtype.element_ty
    tl.store(places, _stored(first, scales, heads, there, KIND, NATIVE), mask=mask)
    tl.store(places + HALF, _stored(second, scales, heads, there, KIND, NATIVE), mask=mask)


@jit
def _write_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    block_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_LINES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """One program per token; `scales` are [2, HEADS], of keys and of values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    keys = _load_heads(key + token * key_stride, HEADS, HEAD_LINES, HEAD_SIZE, HEAD_TILE)
    values = _load_heads(value + token * value_stride, HEADS, HEAD_LINES, HEAD_SIZE, HEAD_TILE)
    _store_heads(
        keys, key_cache, scales, slot, block_stride,
        HEADS, HEAD_LINES, HEAD_SIZE, HEAD_TILE, BLOCK_SIZE, NATIVE,
    )  # fmt: skip
    _store_heads(
        values, value_cache, scales + HEADS, slot, block_stride,
        HEADS, HEAD_LINES, HEAD_SIZE, HEAD_TILE, BLOCK_SIZE, NATIVE,
    )  # fmt: skip


@jit_once_for("positions")
def _rotary_write_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    rotated: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    block_stride: tl.tensor,
    QUERY_HEADS: tl.constexpr,
    QUERY_LINES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_LINES: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """One program per token; `scales` are [2, HEADS], of keys and of values.

    All loads come before the first store, so that none waits for another.
    """
    HALF_TILE: tl.constexpr = HEAD_TILE // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    turns = cos_sin + tl.load(positions + token).to(tl.int64) * HEAD_SIZE
    values = _load_heads(value + token * value_stride, HEADS, HEAD_LINES, HEAD_SIZE, HEAD_TILE)
    first_keys, second_keys = _rotated(
        key + token * key_stride, turns, HEADS, HEAD_LINES, HEAD_SIZE, HALF_TILE
    )
    first, second = _rotated(
        query + token * query_stride, turns, QUERY_HEADS, QUERY_LINES, HEAD_SIZE, HALF_TILE
    )
    line = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * HEAD_SIZE
    _store_halves(
        first_keys, second_keys, key_cache + line, BLOCK_SIZE * HEAD_SIZE, scales,
        HEADS, HEAD_LINES, HEAD_SIZE, HALF_TILE, NATIVE,
    )  # fmt: skip
    _store_heads(
        values, value_cache, scales + HEADS, slot, block_stride,
        HEADS, HEAD_LINES, HEAD_SIZE, HEAD_TILE, BLOCK_SIZE, NATIVE,
    )  # fmt: skip
    _store_halves(
        first, second, rotated + token * (QUERY_HEADS * HEAD_SIZE), HEAD_SIZE, scales,
        QUERY_HEADS, QUERY_LINES, HEAD_SIZE, HALF_TILE, NATIVE,
    )  # fmt: skip


@jit
def _copy_kernel(
    caches: tl.tensor,
    pairs: tl.tensor,
    plane_size: tl.tensor,
    block_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """One program per (pair, tile of a block, plane)."""
    pair = tl.program_id(0)
    source = tl.load(pairs + 2 * pair)
    target = tl.load(pairs + 2 * pair + 1)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = places < block_size
    plane = caches + tl.program_id(2).to(tl.int64) * plane_size
    values = tl.load(plane + source * block_size + places, mask=mask)
    tl.store(plane + target * block_size + places, values, mask=mask)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    kv_scales: Tensor | None = None,
    *,
    chip: Chip | None = None,
) -> None:
    """`reference.write_kv`, on the GPU; see there for the arguments. `chip` is what to launch for,
    instead of the chip of `key`.

    `key` and `value` may be views [T, G, D] with any distance between tokens.
    """
    tokens, heads, head_size = key.shape
    if tokens == 0:
        return
    _write_kernel[(tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        key if kv_scales is None else kv_scales,
        slots,
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        HEADS=heads,
        HEAD_LINES=triton.next_power_of_2(heads),
        HEAD_SIZE=head_size,
        HEAD_TILE=triton.next_power_of_2(head_size),
        BLOCK_SIZE=key_cache.shape[2],
        NATIVE=(chip or chip_of(key.device)).converts_fp8,
        enable_fp_fusion=True,
    )


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
    *,
    chip: Chip | None = None,
) -> Tensor:
    """Rotate queries and keys by their positions and store keys and values, in one launch.

    Args:
        query: [T, H, D], any distance between tokens; dimension i pairs with i + D / 2.
        key: [T, G, D], likewise.
        value: [T, G, D], likewise.
        cos_sin: float32 [positions, D], each position's D / 2 cosines, then its sines.
        positions: integers [T].
        key_cache: [N, G, S, D].
        value_cache: the same shape.
        slots: int64 [T], as for `write_kv`.
        kv_scales: float32 [2, G], as for `reference.write_kv`.
        chip: as for `write_kv`.

    Returns:
        The rotated queries, [T, H, D] in the dtype of `query`.
    """
    tokens, query_heads, head_size = query.shape
    heads = key.shape[1]
    rotated = query.new_empty(query.shape)
    if tokens == 0:
        return rotated
    _rotary_write_kernel[(tokens,)](
        query,
        key,
        value,
        cos_sin,
        positions,
        rotated,
        key_cache,
        value_cache,
        key if kv_scales is None else kv_scales,
        slots,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        QUERY_HEADS=query_heads,
        QUERY_LINES=triton.next_power_of_2(query_heads),
        HEADS=heads,
        HEAD_LINES=triton.next_power_of_2(heads),
        HEAD_SIZE=head_size,
        HEAD_TILE=triton.next_power_of_2(head_size),
        BLOCK_SIZE=key_cache.shape[2],
        NATIVE=(chip or chip_of(key.device)).converts_fp8,
        num_warps=4 if query_heads * head_size <= _WIDE_TOKEN else 8,
        enable_fp_fusion=True,
    )
    return rotated


def copy_blocks(caches: Tensor, pairs: Tensor) -> None:
    """`reference.copy_blocks`, on the GPU; see there for the arguments.

    All pairs are copied at once, in no order. That is what the reference does as long as no
    target of one pair is the source of another; the planner never asks for that.

    Args:
        caches: contiguous.
    """
    blocks = caches.shape[-4]
    planes = caches.view(-1, blocks, caches.shape[-3:].numel())
    if len(pairs) == 0:
        return
    block_size = planes.shape[2]
    _copy_kernel[(len(pairs), triton.cdiv(block_size, _COPY_TILE), len(planes))](
        planes, pairs, planes.stride(0), block_size, TILE=_COPY_TILE, enable_fp_fusion=True
    )
