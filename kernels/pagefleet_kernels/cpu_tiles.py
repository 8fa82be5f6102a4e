"""The inner loops of attention on the CPU: several queries of one key/value head against keys.

Two routines compute scores, and they must agree to the last bit, because a token's result may not
depend on how many others came with it (decode against prefill):

    `scores`         keys as they lie in the pool. The lanes of a product are summed chunk after
                     chunk, then folded by halves (l with l + 8, l + 4, l + 2, l + 1); sixteen keys
                     are folded together, as one transposition that adds.
    `packed_scores`  keys transposed once by `pack` and used by many queries, as a matrix product
                     does (Goto and van de Geijn, ACM TOMS 34(3), 2008). One lane is one key, so
                     the same sum is spelled out: sixteen partial sums, added in the same tree.

In bfloat16 both multiply two numbers of a query and a key at a time, by VDPBF16PS, where the
processor has it and a head has whole vectors of them: then a lane stands for a pair.

`weigh` adds weighted values key by key, in ascending order; queries never mix in it, so any number
of them may share the values that it loads.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pagefleet_kernels.cpu_ir import (
    FLOAT,
    INTS,
    LANES,
    VECTOR,
    at,
    call,
    floats,
    intrinsic,
    load,
    paired_product,
    shuffle,
    splat,
    store,
)
from pagefleet_kernels.cpu_rows import (
    FLOAT_BYTES,
    VECTOR_BYTES,
    Block,
    Piece,
    emit_prefetch,
    load_keys,
    load_piece,
    pieces,
    row_address,
)

TILE = 128
"""Keys between two corrections of the running maximum, counted from position 0 of a sequence."""

_ACCUMULATORS = 24
"""Vectors of running sums that stay in registers; AVX-512 has thirty-two."""


def _fold_together(builder: Any, rows: list[Any], width: int) -> Any:
    """One level of the transposition that adds: each row's segments of `width` lanes are halved.

    The shuffles stay within what one instruction does; the row that ends in lane 4 * (r % 4) +
    r // 4 is number r in the order of the leaves.
    """
    quads = range(0, LANES, 4)
    if width == 16:
        low = [*range(8), *range(16, 24)]
    elif width == 8:
        low = [lane for quad in (0, 8, 16, 24) for lane in range(quad, quad + 4)]
    elif width == 4:
        low = [lane for quad in quads for lane in (quad, quad + 1, quad + 16, quad + 17)]
    else:
        low = [lane for quad in quads for lane in (quad, quad + 2, quad + 16, quad + 18)]
    high = [lane + width // 2 for lane in low]
    left, right = rows
    return builder.fadd(shuffle(builder, left, right, low), shuffle(builder, left, right, high))


def _grown(builder: Any, block: Block, factor: Any, numbers: Any, sums: Any) -> Any:
    """A query's sums with one more part of a key; None is no sum yet."""
    if block.paired:
        return paired_product(builder, factor, numbers, floats(0.0) if sums is None else sums)
    if sums is None:
        return builder.fmul(factor, numbers)
    return call(builder, "fma", factor, numbers, sums)


def _store_scores(builder: Any, rows: list[Any], scale: Any, output: Any) -> None:
    factor = splat(builder, scale)
    for query, row in enumerate(rows):
        place = at(builder, output, query * TILE * FLOAT_BYTES)
        store(builder, builder.fmul(row, factor), place)


def _emit_scores(
    builder: Any,
    block: Block,
    queries: Any,
    offsets: Any,
    keys: Any,
    values: Any,
    output: Any,
    scale: Any,
) -> None:
    def products(leaf: int) -> list[Any]:
        key = ir.Constant(ir.IntType(64), 4 * (leaf % 4) + leaf // 4)
        address = row_address(builder, offsets, keys, key)
        emit_prefetch(builder, block, row_address(builder, offsets, values, key))
        sums: list[Any] = [None] * block.queries
        for piece in pieces(block):
            for number, numbers in load_keys(builder, block, address, piece):
                for query in range(block.queries):
                    place = query * block.row_bytes + number * VECTOR_BYTES
                    factor = load(builder, at(builder, queries, place), numbers.type)
                    sums[query] = _grown(builder, block, factor, numbers, sums[query])
        return sums

    def folded(leaf: int, width: int) -> list[Any]:
        """The leaves `leaf` .. `leaf` + 16 / width - 1, each folded to `width` lanes."""
        if width == LANES:
            return products(leaf)
        halves = (folded(leaf, 2 * width), folded(leaf + LANES // (2 * width), 2 * width))
        return [
            _fold_together(builder, list(rows), 2 * width) for rows in zip(*halves, strict=True)
        ]

    _store_scores(builder, folded(0, 1), scale, output)


def _emit_packed_scores(
    builder: Any, block: Block, queries: Any, panel: Any, output: Any, scale: Any
) -> None:
    kind = INTS if block.paired else VECTOR

    def products(lane: int) -> list[Any]:
        sums: list[Any] = [None] * block.queries
        for part in range(block.chunks // 2 if block.paired else block.chunks):
            number = part * LANES + lane
            numbers = load(builder, at(builder, panel, number * VECTOR_BYTES), kind)
            for query in range(block.queries):
                place = at(builder, queries, query * block.row_bytes + number * FLOAT_BYTES)
                factor = splat(builder, load(builder, place, kind.element))
                sums[query] = _grown(builder, block, factor, numbers, sums[query])
        return sums

    def folded(lane: int, stride: int) -> list[Any]:
        if stride == LANES:
            return products(lane)
        halves = (folded(lane, 2 * stride), folded(lane + stride, 2 * stride))
        return [builder.fadd(left, right) for left, right in zip(*halves, strict=True)]

    _store_scores(builder, folded(0, 1), scale, output)


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Sixteen vectors of sixteen lanes, transposed in four rounds of exchanges."""
    distance = LANES // 2
    while distance:
        low = [lane if lane & distance == 0 else lane - distance + LANES for lane in range(LANES)]
        high = [lane + distance for lane in low]
        exchanged = list(rows)
        for index in range(LANES):
            if index & distance == 0:
                left, right = rows[index], rows[index + distance]
                exchanged[index] = shuffle(builder, left, right, low)
                exchanged[index + distance] = shuffle(builder, left, right, high)
        rows, distance = exchanged, distance // 2
    return rows


def _emit_pack(builder: Any, block: Block, offsets: Any, keys: Any, panel: Any) -> None:
    word = ir.IntType(64)
    addresses = [
        row_address(builder, offsets, keys, ir.Constant(word, key)) for key in range(LANES)
    ]
    for piece in pieces(block):
        loaded = [load_keys(builder, block, address, piece) for address in addresses]
        for parts in zip(*loaded, strict=True):
            columns = _transposed(builder, [numbers for _, numbers in parts])
            for lane, column in enumerate(columns):
                number = parts[0][0] * LANES + lane
                store(builder, column, at(builder, panel, number * VECTOR_BYTES))


def _emit_weigh(
    builder: Any,
    block: Block,
    weights: Any,
    offsets: Any,
    values: Any,
    output: Any,
    begin: Any,
    end: Any,
    ahead: Any,
    ahead_offsets: Any,
) -> None:
    """The loop over keys, once for each group of pieces whose sums fit into the registers."""
    room = max(_ACCUMULATORS // block.queries, 2)
    groups: list[list[Piece]] = [[]]
    for piece in pieces(block):
        if sum(len(p.chunks) for p in groups[-1]) + len(piece.chunks) > room:
            groups.append([])
        groups[-1].append(piece)
    one = ir.Constant(begin.type, 1)
    for number, group in enumerate(groups):
        places = [
            query * block.state_bytes + chunk * VECTOR_BYTES
            for piece in group
            for chunk in piece.chunks
            for query in range(block.queries)
        ]
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in places]
        for slot, place in zip(sums, places, strict=True):
            builder.store(load(builder, at(builder, output, place)), slot)
        with cgutils.for_range_slice(builder, begin, end, one) as (key, _):
            address = row_address(builder, offsets, values, key)
            if number == 0:
                emit_prefetch(builder, block, row_address(builder, ahead_offsets, ahead, key))
            entry = builder.add(weights, builder.mul(key, ir.Constant(key.type, FLOAT_BYTES)))
            factors = [
                splat(builder, load(builder, at(builder, entry, q * TILE * FLOAT_BYTES), FLOAT))
                for q in range(block.queries)
            ]
            slots = iter(sums)
            for piece in group:
                for chunk in load_piece(builder, block, address, piece):
                    for factor in factors:
                        slot = next(slots)
                        updated = call(builder, "fma", factor, chunk, builder.load(slot))
                        builder.store(updated, slot)
        for slot, place in zip(sums, places, strict=True):
            store(builder, builder.load(slot), at(builder, output, place))


_WORD = types.int64


@intrinsic
def scores(
    typing: Any,
    block: Any,
    queries: Any,
    offsets: Any,
    keys: Any,
    values: Any,
    output: Any,
    scale: Any,
) -> Any:
    """Scores of a block of queries with the sixteen keys at `keys` + `offsets`. Their values, at
    `values` + `offsets`, are sent for on the way.

    Args:
        block: a `Block`.
        queries: address of its queries, as `load_query` lays them out.
        offsets: address of sixteen int64 offsets in bytes.
        keys: address that the offsets count from.
        values: address that the offsets count from.
        output: address of float32 [queries, TILE], of which sixteen columns are written.
        scale: float32 that products are multiplied by.
    """

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_scores(builder, block.value, *arguments[1:])
        return context.get_dummy_value()

    return types.void(block, *([_WORD] * 5), types.float32), lower


@intrinsic
def packed_scores(
    typing: Any, block: Any, queries: Any, panel: Any, output: Any, scale: Any
) -> Any:
    """As `scores`, bit for bit, with the sixteen keys of a `panel`."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_packed_scores(builder, block.value, *arguments[1:])
        return context.get_dummy_value()

    return types.void(block, _WORD, _WORD, _WORD, types.float32), lower


@intrinsic
def pack(typing: Any, block: Any, offsets: Any, keys: Any, panel: Any) -> Any:
    """Transposes sixteen keys into a panel: [numbers or pairs as `load_keys` has them, 16 keys]."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_pack(builder, block.value, *arguments[1:])
        return context.get_dummy_value()

    return types.void(block, _WORD, _WORD, _WORD), lower


@intrinsic
def weigh(
    typing: Any,
    block: Any,
    weights: Any,
    offsets: Any,
    values: Any,
    output: Any,
    begin: Any,
    end: Any,
    ahead: Any,
    ahead_offsets: Any,
) -> Any:
    """Adds the weighted values of keys `begin` .. `end` - 1 of a tile to a block's sums.

    Args:
        block: a `Block`.
        weights: address of float32 [queries, TILE].
        offsets: address of TILE int64 offsets in bytes.
        values: address that the offsets count from.
        output: address of the sums, in scratch order, one every `state_bytes`.
        begin: first key.
        end: one past the last key.
        ahead: with `ahead_offsets`, where the rows lie that are needed next: as many are sent for.
        ahead_offsets: address of TILE int64 offsets in bytes.
    """

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_weigh(builder, block.value, *arguments[1:])
        return context.get_dummy_value()

    return types.void(block, *([_WORD] * 8)), lower
