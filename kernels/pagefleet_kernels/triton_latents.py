"""Latents on GPUs, in Triton: how they are written, and matrices of which each head has its own.

A program writes one token; its slot is read on the device, so the host never waits. A product is
one sum over the inputs, in order, in tiles whose sizes depend on the weights' shape alone: a row's
bits do not depend on its batch.
"""

import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.triton_jit import jit, jit_once_for
from pagefleet_kernels.triton_matmul import dot_type
from pagefleet_kernels.triton_tiling import Chip, chip_of

_ROWS, _COLUMNS = 64, 64
_DEPTH_BYTES = 128


@jit
def _turn(
    source: tl.tensor,
    target: tl.tensor,
    turns: tl.tensor,
    heads: tl.tensor,
    source_step: tl.tensor,
    target_step: tl.tensor,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    HALF_TILE: tl.constexpr,
) -> None:
    """Rotate TURNED numbers of each of the heads, which are so far apart."""
    HALF: tl.constexpr = TURNED // 2
    dims = tl.arange(0, HALF_TILE)[None, :]
    mask = (heads < HEADS) & (dims < HALF)
    cosines = tl.load(turns + dims, mask=dims < HALF)
    sines = tl.load(turns + HALF + dims, mask=dims < HALF)
    places = source + heads * source_step + dims
    first = tl.load(places, mask=mask).to(tl.float32)
    second = tl.load(places + HALF, mask=mask).to(tl.float32)
    TYPE: tl.constexpr = target.dtype.element_ty
    places = target + heads * target_step + dims
    tl.store(places, (first * cosines - second * sines).to(TYPE), mask=mask)
    tl.store(places + HALF, (second * cosines + first * sines).to(TYPE), mask=mask)


@jit_once_for("positions")
def _write_kernel(
    query: tl.tensor,
    latent: tl.tensor,
    key: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    rotated: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    query_stride: tl.tensor,
    latent_stride: tl.tensor,
    key_stride: tl.tensor,
    block_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_LINES: tl.constexpr,
    QUERY_SIZE: tl.constexpr,
    STILL_TILE: tl.constexpr,
    LATENT_SIZE: tl.constexpr,
    LATENT_TILE: tl.constexpr,
    TURNED: tl.constexpr,
    HALF_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """One program per token."""
    STILL: tl.constexpr = QUERY_SIZE - TURNED
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    turns = cos_sin + tl.load(positions + token).to(tl.int64) * TURNED
    entry = cache + slot // BLOCK_SIZE * block_stride
    entry += slot % BLOCK_SIZE * (LATENT_SIZE + TURNED)
    dims = tl.arange(0, LATENT_TILE)
    values = tl.load(latent + token * latent_stride + dims, mask=dims < LATENT_SIZE)
    tl.store(entry + dims, values.to(cache.dtype.element_ty), mask=dims < LATENT_SIZE)
    one = tl.arange(0, 1)[:, None]
    _turn(key + token * key_stride, entry + LATENT_SIZE, turns, one, 0, 0, 1, TURNED, HALF_TILE)
    heads = tl.arange(0, HEAD_LINES)[:, None]
    dims = tl.arange(0, STILL_TILE)[None, :]
    source = query + token * query_stride
    target = rotated + token * (HEADS * QUERY_SIZE)
    mask = (heads < HEADS) & (dims < STILL)
    places = heads * QUERY_SIZE + dims
    tl.store(target + places, tl.load(source + places, mask=mask), mask=mask)
    _turn(
        source + STILL, target + STILL, turns, heads, QUERY_SIZE, QUERY_SIZE,
        HEADS, TURNED, HALF_TILE,
    )  # fmt: skip


@jit_once_for("rows")
def _heads_kernel(
    values: tl.tensor,
    weights: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    value_stride: tl.tensor,
    HEADS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """One program per (rows, columns, head)."""
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(2)
    depths = tl.arange(0, DEPTH)
    left = values + lines.to(tl.int64)[:, None] * value_stride + head * INPUTS + depths[None, :]
    right = weights + (head.to(tl.int64) * OUTPUTS + columns)[None, :] * INPUTS + depths[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, INPUTS, DEPTH):
        inside = begin + depths < INPUTS
        row_mask = (lines < rows)[:, None] & inside[None, :]
        column_mask = (columns < OUTPUTS)[None, :] & inside[:, None]
        part = tl.load(left + begin, mask=row_mask, other=0.0).to(DOT_TYPE)
        weight = tl.load(right + begin, mask=column_mask, other=0.0).to(DOT_TYPE)
        sums = tl.dot(part, weight, sums, input_precision="ieee")
    places = lines.to(tl.int64)[:, None] * (HEADS * OUTPUTS) + head * OUTPUTS + columns[None, :]
    mask = (lines < rows)[:, None] & (columns < OUTPUTS)[None, :]
    tl.store(output + places, sums.to(output.dtype.element_ty), mask=mask)


def rotary_write_latents(
    query: Tensor,
    latent: Tensor,
    key: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """`reference.rotary_write_latents`, on the GPU, in one launch; see there for the arguments.

    `query` may be a view [T, H, Q] with any distance between tokens, as `latent` and `key` may.
    """
    tokens, heads, query_size = query.shape
    rotated = query.new_empty(query.shape)
    if tokens == 0:
        return rotated
    turned = key.shape[1]
    _write_kernel[(tokens,)](
        query,
        latent,
        key,
        cos_sin,
        positions,
        rotated,
        cache,
        slots,
        query.stride(0),
        latent.stride(0),
        key.stride(0),
        cache.stride(0),
        HEADS=heads,
        HEAD_LINES=triton.next_power_of_2(heads),
        QUERY_SIZE=query_size,
        STILL_TILE=triton.next_power_of_2(query_size - turned),
        LATENT_SIZE=latent.shape[1],
        LATENT_TILE=triton.next_power_of_2(latent.shape[1]),
        TURNED=turned,
        HALF_TILE=triton.next_power_of_2(turned // 2),
        BLOCK_SIZE=cache.shape[2],
        num_warps=8,
        enable_fp_fusion=True,
    )
    return rotated


def product_by_heads(values: Tensor, weights: Tensor, *, chip: Chip | None = None) -> Tensor:
    """What `reference.by_heads` makes of values.

    Args:
        values: [T, H, inputs], heads contiguous.
        weights: [H, outputs, inputs], contiguous, of the same type.
        chip: what to launch for, instead of the chip of `values`.

    Returns:
        [T, H, outputs] in the type of `values`, of sums in float32.
    """
    rows, (heads, outputs, inputs) = len(values), weights.shape
    output = values.new_empty(rows, heads, outputs)
    chip = chip or chip_of(values.device)
    if rows:
        _heads_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(outputs, _COLUMNS), heads)](
            values,
            weights,
            output,
            rows,
            values.stride(0),
            HEADS=heads,
            INPUTS=inputs,
            OUTPUTS=outputs,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH_BYTES // values.element_size(),
            DOT_TYPE=dot_type(values.dtype),
            num_warps=4,
            num_stages=min(4, chip.stages),
            enable_fp_fusion=False,
        )
    return output
