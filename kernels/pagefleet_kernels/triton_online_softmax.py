"""The inner loop of paged attention in Triton: a query tile meets the keys between two positions.

Weights are summed as they come, over a maximum that may still rise: an online softmax (Milakov and
Gimelshein, arXiv 1805.02867; FlashAttention-2, Dao, arXiv 2307.08691, section 3.1).
"""

import triton.language as tl

from pagefleet_kernels.triton_fp8 import decode
from pagefleet_kernels.triton_jit import jit

_LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def _tanh(x: tl.tensor) -> tl.tensor:
    return 1 - 2 / (tl.exp2(x * (2 * _LOG2_E)) + 1)


@jit
def _shift(top: tl.tensor) -> tl.tensor:
    """A finite stand-in for the maximum of no scores, so that exp2(-inf - shift) is 0, not NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@jit
def merge(
    sums: tl.tensor,
    top: tl.tensor,
    mass: tl.tensor,
    split_sums: tl.tensor,
    split_top: tl.tensor,
    split_mass: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add one split's (weighted values, maximum, total weight) to those of the splits before it."""
    merged_top = tl.maximum(top, split_top)
    shift = _shift(merged_top)
    decay = tl.exp2(top - shift)
    split_decay = tl.exp2(split_top - shift)
    sums = tl.fma(sums, decay[:, None], split_sums * split_decay[:, None])
    return sums, merged_top, tl.fma(mass, decay, split_mass * split_decay)


@jit
def with_sinks(mass: tl.tensor, top: tl.tensor, sinks: tl.tensor) -> tl.tensor:
    """The total weights with those of sinks, which count once, behind all keys."""
    return mass + tl.exp2(tl.fma(sinks, _LOG2_E, -top))


@jit
def _load_keys(
    base: tl.tensor,
    places: tl.tensor,
    live: tl.tensor,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    NATIVE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """[keys, SIZE_TILE] of keys or values; what is not live is never read, and counts as zero."""
    dims = tl.arange(0, SIZE_TILE)
    pointers = base + places[:, None] + dims[None, :]
    if MASKED or SIZE_TILE != SIZE:
        values = tl.load(pointers, mask=live[:, None] & (dims < SIZE)[None, :], other=0)
    else:
        values = tl.load(pointers)
    if base.dtype.element_ty == tl.uint8:
        operand = decode(values, DOT_TYPE, NATIVE)
    else:
        operand = values.to(DOT_TYPE)
    return operand


@jit
def attend(
    queries: tl.tensor,
    rest: tl.tensor,
    positions: tl.tensor,
    first_position: tl.tensor,
    slope: tl.tensor,
    key_base: tl.tensor,
    value_base: tl.tensor,
    table: tl.tensor,
    block_stride: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    oldest: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Online softmax over the keys begin .. end: (weighted values, maximum, total weight).

    Maxima are in units of log2: a score's weight is exp2(score * factor - maximum). The key tiles
    that every query of the tile sees whole come first and go without masks. Latents, whose keys are
    longer than their values, are read once: `rest` are the queries behind VALUE_SIZE.
    """
    LATENT: tl.constexpr = HEAD_SIZE > VALUE_SIZE
    sums = tl.zeros([QUERIES, VALUE_TILE], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    factor = _LOG2_E if CAPPED or SLOPED else scale * _LOG2_E
    border = begin
    if not WINDOW:
        border = tl.minimum(tl.maximum((first_position + 1) // KEYS * KEYS, begin), end)
    for MASKED in tl.static_range(1 if WINDOW else 0, 2):
        phase_begin = border if MASKED else begin
        phase_end = end if MASKED else border
        for tile_begin in range(phase_begin, phase_end, KEYS):
            seen = tile_begin + tl.arange(0, KEYS)
            live = (seen >= oldest) & (seen < end)
            if MASKED:
                blocks = tl.load(table + seen // BLOCK_SIZE, mask=live, other=0)
            else:
                blocks = tl.load(table + seen // BLOCK_SIZE)
            places = blocks.to(tl.int64) * block_stride + seen % BLOCK_SIZE * HEAD_SIZE
            keys = _load_keys(
                key_base, places, live, VALUE_SIZE, VALUE_TILE, DOT_TYPE, NATIVE, MASKED
            )
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if LATENT:
                others = _load_keys(
                    key_base + VALUE_SIZE,
                    places,
                    live,
                    HEAD_SIZE - VALUE_SIZE,
                    REST_TILE,
                    DOT_TYPE,
                    NATIVE,
                    MASKED,
                )
                scores = tl.dot(rest, tl.trans(others), scores, input_precision="ieee")
            distance = seen[None, :] - positions[:, None]
            if CAPPED:
                scores = softcap * _tanh(scores * (scale / softcap))
            elif SLOPED:
                scores = scores * scale
            if SLOPED:
                scores = tl.fma(slope[:, None], distance.to(tl.float32), scores)
            if MASKED:
                visible = (distance <= 0) & live[None, :]
                if WINDOW:
                    visible &= distance > -WINDOW
                scores = tl.where(visible, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1) * factor)
            shift = _shift(new_top)
            decay = tl.exp2(top - shift)
            weights = tl.exp2(tl.fma(scores, factor, -shift[:, None]))
            mass = tl.fma(mass, decay, tl.sum(weights, 1))
            values = keys
            if not LATENT:
                values = _load_keys(
                    value_base, places, live, VALUE_SIZE, VALUE_TILE, DOT_TYPE, NATIVE, MASKED
                )
            decayed = sums * decay[:, None]
            sums = tl.dot(weights.to(DOT_TYPE), values, decayed, input_precision="ieee")
            top = new_top
    return sums, top, mass
