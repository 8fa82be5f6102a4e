"""What is written to the pool, in plain torch: a part of `reference`, where its layout is told."""

import torch
from torch import Tensor

_E4M3_MOST = 448.0


def from_e4m3(cache: Tensor) -> Tensor:
    """uint8 as the float32 that it stands for."""
    return cache.view(torch.float8_e4m3fn).to(torch.float32)


def _to_e4m3(values: Tensor, scales: Tensor) -> Tensor:
    """Values [T, G, D] over the scales [G]."""
    scaled = (values / scales[:, None].to(values.dtype)).clamp(-_E4M3_MOST, _E4M3_MOST)
    return scaled.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Store the keys and values of a step's tokens in the pool, in place.

    Caches of uint8 hold numbers of 8 bits (e4m3, "FP8 formats for deep learning", Micikevicius et
    al., 2022), each head's over its scale; what is too large becomes the largest, NaN stays NaN.

    Args:
        key: [T, G, D].
        value: [T, G, D].
        key_cache: [N, G, S, D].
        value_cache: the same shape.
        slots: int64 [T], where each token goes: physical block * S + slot within the block.
        kv_scales: float32 [2, G], those of keys and of values; needed for uint8.
    """
    if kv_scales is not None:
        key, value = _to_e4m3(key, kv_scales[0]), _to_e4m3(value, kv_scales[1])
    blocks, within = slots // key_cache.shape[2], slots % key_cache.shape[2]
    key_cache[blocks, :, within] = key.to(key_cache.dtype)
    value_cache[blocks, :, within] = value.to(value_cache.dtype)


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
    """Rotate queries and keys by their positions (RoFormer, Su et al., 2021; dimension i is paired
    with i + D / 2, as in GPT-NeoX), then store keys and values as `write_kv` does.

    Args:
        query: [T, H, D].
        key: [T, G, D].
        value: [T, G, D].
        cos_sin: float32 [positions, D], each position's D / 2 cosines, then its sines.
        positions: int64 [T].
        key_cache: [N, G, S, D].
        value_cache: the same shape.
        slots: int64 [T].
        kv_scales: see `write_kv`.

    Returns:
        The rotated queries, [T, H, D] in the dtype of `query`.
    """
    turns = cos_sin[positions]
    write_kv(_rotated(key, turns), value, key_cache, value_cache, slots, kv_scales)
    return _rotated(query, turns)


def _rotated(heads: Tensor, turns: Tensor) -> Tensor:
    """Heads [T, H, D] by their tokens' angles [T, D]."""
    cosines, sines = turns.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.to(torch.promote_types(heads.dtype, torch.float32)).chunk(2, dim=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(turned, dim=-1).to(heads.dtype)


def rotary_write_latents(
    query: Tensor,
    latent: Tensor,
    key: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotate the shared keys, and of queries as many last numbers, by their positions; then store
    latents, and behind each its shared key.

    Args:
        query: [T, H, Q].
        latent: [T, L].
        key: [T, R], R at most Q.
        cos_sin: float32 [positions, R], see `rotary_write_kv`.
        positions: int64 [T].
        cache: [N, 1, S, L + R].
        slots: int64 [T], see `write_kv`.

    Returns:
        The rotated queries, [T, H, Q] in the dtype of `query`.
    """
    turns = cos_sin[positions]
    rotated = _rotated(key.unsqueeze(1), turns).squeeze(1)
    blocks, within = slots // cache.shape[2], slots % cache.shape[2]
    cache[blocks, 0, within] = torch.cat([latent, rotated], dim=1).to(cache.dtype)
    still, turned = torch.split(query, [query.shape[2] - key.shape[1], key.shape[1]], 2)
    return torch.cat([still, _rotated(turned, turns)], dim=2)


def copy_blocks(caches: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks within the pool: all sources are read before any target is written.

    Args:
        caches: [..., N, G, S, D]; every leading index (layer, key or value) is copied.
        pairs: int64 [P, 2] of (source, target) block numbers; no target occurs twice.
    """
    block_axis = caches.dim() - 4
    caches.index_copy_(block_axis, pairs[:, 1], caches.index_select(block_axis, pairs[:, 0]))
