"""Paged attention on GPUs, in Triton: one kernel for prefill, decode and everything between.

A program owns a *query tile* (some tokens of one row, times the query heads that share one
key/value head, so that a tile of keys is read once for all of them) and walks over the row's keys
with an online softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2, Dao,
arXiv 2307.08691, section 3.1). Rows of any lengths share one launch: row r owns the query tiles
from offsets[r] // tokens + r, and a program finds its row by bisection, so the host never waits to
learn a length.

The keys of a row fall into *splits*, borders at multiples of a number of positions. A program
either walks over all of them, or takes one and leaves its share for a second kernel
(Flash-Decoding, Dao et al., 2023), which a batch with few query tiles needs to fill the chip. The
launch fixes how many programs share a row, the row's own length, read on the device, how far its
borders lie apart: one captured launch is right for short and for long contexts.

Batch invariance. In the invariant mode the tiling depends on the model alone. Tiles and splits
then begin at fixed positions, splits are merged in order by the same fused multiply-adds whichever
kernel merges them, and a tile of which a row sees nothing leaves the row's state unchanged to the
bit (its maximum stays, exp2(0) = 1 scales it, zeros are added). Contraction of other products and
sums is left to no compiler's taste (`enable_fp_fusion` off). So a row's output depends on its own
tokens and keys only: not on its batch, on chunking, or on prefill and decode.
"""

import torch
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.triton_jit import INTERPRETED, jit, jit_once_for
from pagefleet_kernels.triton_online_softmax import attend, merge, with_sinks
from pagefleet_kernels.triton_tiling import (
    Chip,
    Tiling,
    chip_of,
    choose_tiling,
    matrix_side,
    most_heads,
)

_DOT_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@jit
def _find_row(
    offsets: tl.tensor, rows: tl.tensor, index: tl.tensor, TOKENS: tl.constexpr, GAP: tl.constexpr
) -> tl.tensor:
    """The last row whose first index, offsets[row] // TOKENS + row * GAP, is at most `index`.

    Where every row has one token, as in most decode steps, it is known after one look.
    """
    low = tl.minimum(index - index // (TOKENS + 1) * GAP, rows - 1)
    high = low + 1
    begin = tl.load(offsets + low) // TOKENS + low * GAP
    end = tl.load(offsets + high) // TOKENS + high * GAP
    if (begin > index) | (end <= index):
        low = index * 0
        high = low + rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(offsets + middle) // TOKENS + middle * GAP <= index:
            low = middle
        else:
            high = middle
    return low


@jit
def _split_of(
    context: tl.tensor, splits: tl.tensor, split: tl.tensor, KEYS: tl.constexpr
) -> tl.tensor:
    """Positions between two borders of a row of `context` positions: at least `split`."""
    return tl.maximum(split, tl.cdiv(tl.cdiv(context, splits), KEYS) * KEYS)


@jit_once_for("rows", "table_stride")
def _attention_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    tables: tl.tensor,
    starts: tl.tensor,
    offsets: tl.tensor,
    slopes: tl.tensor,
    sinks: tl.tensor,
    kv_scales: tl.tensor,
    output: tl.tensor,
    split_sums: tl.tensor,
    split_stats: tl.tensor,
    rows: tl.tensor,
    split: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    query_stride: tl.tensor,
    block_stride: tl.tensor,
    table_stride: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
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
    SINKING: tl.constexpr,
    CONCURRENT: tl.constexpr,
    SERIAL: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """One program per (query tile, GROUP of query heads, split if CONCURRENT).

    SERIAL tells that a program may walk over more than one split. `kv_scales` are [2, heads of
    keys], where caches are uint8. Each group reads a key/value head, all of them the same if there
    are latents, which is where HEAD_SIZE, of keys, is larger than VALUE_SIZE.
    Without CONCURRENT it writes `output` [T, H, V]; with it, the split's weighted values to
    `split_sums` [T, H, splits, V] and (maximum, total weight) to `split_stats` [T, H, splits, 2].
    """
    LATENT: tl.constexpr = HEAD_SIZE > VALUE_SIZE
    TOKENS: tl.constexpr = QUERIES // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a row's last tile sees the most keys
    group = tl.program_id(1)
    kv_head = 0 if LATENT else group
    row = _find_row(offsets, rows, tile, TOKENS, 1)
    row_begin = tl.load(offsets + row)
    row_length = tl.load(offsets + row + 1) - row_begin
    first = (tile - row_begin // TOKENS - row) * TOKENS
    if first >= row_length:
        return

    start = tl.load(starts + row)
    if CONCURRENT:
        split = _split_of(start + row_length, tl.num_programs(2), split, KEYS)
    first_position = start + first
    context = first_position + tl.minimum(TOKENS, row_length - first)
    oldest = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW else 0
    first_split = oldest // split
    last_split = tl.cdiv(context, split)
    if CONCURRENT:
        first_split = tl.maximum(first_split, tl.program_id(2))
        last_split = tl.minimum(last_split, tl.program_id(2) + 1)
        if first_split >= last_split:
            return

    lane = tl.arange(0, QUERIES)
    dims = tl.arange(0, VALUE_TILE)
    token = first + lane // GROUP
    head = group * GROUP + lane % GROUP
    asked = (lane < TOKENS * GROUP) & (token < row_length)
    place = (row_begin + token).to(tl.int64)
    mask = asked[:, None] & (dims < VALUE_SIZE)[None, :]
    query_places = place * query_stride + head * HEAD_SIZE
    queries = tl.load(query + query_places[:, None] + dims[None, :], mask=mask, other=0.0)
    rest = queries
    if LATENT:
        behind = VALUE_SIZE + tl.arange(0, REST_TILE)
        there = asked[:, None] & (behind < HEAD_SIZE)[None, :]
        rest = tl.load(query + query_places[:, None] + behind[None, :], mask=there, other=0.0)
    slope = tl.load(slopes + head, mask=asked, other=0.0) if SLOPED else 0.0

    EIGHT_BITS: tl.constexpr = key_cache.dtype.element_ty == tl.uint8
    if EIGHT_BITS:
        scale = scale * tl.load(kv_scales + kv_head)
    sums = tl.zeros([QUERIES, VALUE_TILE], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    for index in range(first_split, last_split):
        part_sums, part_top, part_mass = attend(
            queries.to(DOT_TYPE),
            rest.to(DOT_TYPE),
            first_position + lane // GROUP,
            first_position,
            slope,
            key_cache + kv_head * BLOCK_SIZE * HEAD_SIZE,
            value_cache + kv_head * BLOCK_SIZE * HEAD_SIZE,
            tables + row.to(tl.int64) * table_stride,
            block_stride,
            tl.maximum(index * split, oldest // KEYS * KEYS),
            tl.minimum(index * split + split, context),
            oldest,
            scale,
            softcap,
            HEAD_SIZE,
            VALUE_SIZE,
            VALUE_TILE,
            REST_TILE,
            BLOCK_SIZE,
            QUERIES,
            KEYS,
            WINDOW,
            CAPPED,
            SLOPED,
            DOT_TYPE,
            NATIVE,
        )
        if SERIAL:
            sums, top, mass = merge(sums, top, mass, part_sums, part_top, part_mass)
        else:
            sums, top, mass = part_sums, part_top, part_mass

    if EIGHT_BITS:
        sums *= tl.load(kv_scales + tl.num_programs(1) + kv_head)
    answers = place * HEADS + head
    if CONCURRENT:
        parts = answers * tl.num_programs(2) + tl.program_id(2)
        tl.store(split_sums + parts[:, None] * VALUE_SIZE + dims[None, :], sums, mask=mask)
        tl.store(split_stats + parts * 2, top, mask=asked)
        tl.store(split_stats + parts * 2 + 1, mass, mask=asked)
    else:
        if SINKING:
            mass = with_sinks(mass, top, tl.load(sinks + head, mask=asked, other=0.0))
        mass = tl.where(asked, mass, 1.0)
        result = (sums / mass[:, None]).to(output.dtype.element_ty)
        tl.store(output + answers[:, None] * VALUE_SIZE + dims[None, :], result, mask=mask)


@jit_once_for("rows", "splits")
def _merge_kernel(
    split_sums: tl.tensor,
    split_stats: tl.tensor,
    starts: tl.tensor,
    offsets: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKING: tl.constexpr,
) -> None:
    """One program per (token, head): merge the splits that the token sees, in order."""
    token = tl.program_id(0)
    if token >= tl.load(offsets + rows):
        return
    row = _find_row(offsets, rows, token, 1, 0)
    row_begin = tl.load(offsets + row)
    start = tl.load(starts + row)
    row_length = tl.load(offsets + row + 1) - row_begin
    split = _split_of(start + row_length, splits, split, KEYS)
    position = start + token - row_begin
    oldest = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
    dims = tl.arange(0, VALUE_TILE)
    mask = (dims < VALUE_SIZE)[None, :]
    head = tl.program_id(1) + tl.arange(0, 1)
    answers = token.to(tl.int64) * HEADS + head
    sums = tl.zeros([1, VALUE_TILE], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    for index in tl.range(oldest // split, position // split + 1, loop_unroll_factor=8):
        parts = answers * splits + index
        places = parts[:, None] * VALUE_SIZE + dims[None, :]
        part_sums = tl.load(split_sums + places, mask=mask, other=0.0)
        part_top = tl.load(split_stats + parts * 2)
        part_mass = tl.load(split_stats + parts * 2 + 1)
        sums, top, mass = merge(sums, top, mass, part_sums, part_top, part_mass)
    if SINKING:
        mass = with_sinks(mass, top, tl.load(sinks + head))
    result = (sums / mass[:, None]).to(output.dtype.element_ty)
    tl.store(output + answers[:, None] * VALUE_SIZE + dims[None, :], result, mask=mask)


def _dot_type(query: torch.dtype, cache: torch.dtype) -> tl.dtype:
    """The type of the operands of matrix products. (The interpreter's are wrong in bfloat16.)

    Chips turn e4m3 into float16 in one instruction, into bfloat16 in several.
    """
    common = torch.promote_types(query, cache)
    if cache is torch.uint8 and query is not torch.float32:
        common = torch.float16
    if INTERPRETED and common is torch.bfloat16:
        common = torch.float32
    return _DOT_TYPES[common]


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    starts: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_scales: Tensor | None = None,
    invariant: bool = False,
    tiling: Tiling | None = None,
    chip: Chip | None = None,
) -> Tensor:
    """`reference.attention`, on the GPU; see there for the arguments and the result.

    `query` may be a strided view [T, H, D] whose heads are contiguous; tokens past the last row's
    pad a batch, and their outputs are left as they are. Both caches have the same strides; values
    that are shorter than keys are their first numbers, and are not read.
    float32 is computed without tf32.

    Args:
        invariant: a row's bits do not depend on its batch (see the top of this module).
        tiling: how to divide the work, instead of `choose_tiling`'s choice.
        chip: what to launch for, instead of the chip of `query`.
    """
    tokens, heads, head_size = query.shape
    kv_heads, block_size = key_cache.shape[1:3]
    value_size = value_cache.shape[3]
    rows, width = tables.shape
    output = query.new_empty(tokens, heads, value_size)
    if tokens == 0:
        return output
    chip = chip or chip_of(query.device)
    tiling = tiling or choose_tiling(
        query, key_cache, tables, chip, invariant=invariant, value_size=value_size
    )
    concurrent = tiling.splits > 1
    parts = (tokens, heads, tiling.splits) if concurrent else (0, 0, 0)
    split_sums = query.new_empty((*parts, value_size), dtype=torch.float32)
    split_stats = query.new_empty((*parts, 2), dtype=torch.float32)
    group = heads // kv_heads
    if value_size < head_size:
        group = most_heads(heads, tiling.queries)
    constants = {
        "HEADS": heads,
        "VALUE_SIZE": value_size,
        "VALUE_TILE": matrix_side(value_size),
        "KEYS": tiling.keys,
        "WINDOW": window,
        "SINKING": sinks is not None,
        "enable_fp_fusion": not invariant,
    }
    tiles = tokens // (tiling.queries // group) + rows
    _attention_kernel[(tiles, heads // group, tiling.splits)](
        query,
        key_cache,
        value_cache,
        tables,
        starts,
        offsets,
        query if slopes is None else slopes,
        query if sinks is None else sinks,
        query if kv_scales is None else kv_scales,
        output,
        split_sums,
        split_stats,
        rows,
        tiling.split,
        scale,
        softcap,
        query.stride(0),
        key_cache.stride(0),
        tables.stride(0),
        GROUP=group,
        HEAD_SIZE=head_size,
        REST_TILE=matrix_side(head_size - value_size),
        BLOCK_SIZE=block_size,
        QUERIES=tiling.queries,
        CAPPED=softcap > 0,
        SLOPED=slopes is not None,
        CONCURRENT=concurrent,
        SERIAL=not concurrent and (invariant or width * block_size > tiling.split),
        DOT_TYPE=_dot_type(query.dtype, key_cache.dtype),
        NATIVE=chip.converts_fp8,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **constants,
    )
    if concurrent:
        _merge_kernel[(tokens, heads)](
            split_sums,
            split_stats,
            starts,
            offsets,
            query if sinks is None else sinks,
            output,
            rows,
            tiling.split,
            tiling.splits,
            num_warps=1,
            **constants,
        )
    return output
