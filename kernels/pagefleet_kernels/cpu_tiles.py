"""The inner loops of attention on the CPU: several queries of one key/value head against keys.

`scores` multiplies queries with a panel of keys (`cpu_rows`). One lane is one key, and its product
is CHAINS sums of every CHAINS-th word, whose additions need not wait for each other; in bfloat16 a
word is a pair, multiplied by one instruction (VDPBF16PS) where the processor has it. Of keys that
lie as rows one lane is every sixteenth word, and a product the sum of the lanes.

`weigh` adds weighted values key by key, in ascending order; of values in 8 bits two keys at a time
(`Block.paired`).

Queries share loads, never arithmetic: how many there are changes no bit, because a token's result
may not depend on how many others came with it (decode against prefill).
"""

import itertools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pagefleet_kernels.cpu_formats import read_words
from pagefleet_kernels.cpu_ir import (
    FLOAT,
    INT,
    INTS,
    VECTOR,
    Format,
    at,
    floats,
    fold,
    intrinsic,
    load,
    multiply_add_words,
    splat,
    store,
)
from pagefleet_kernels.cpu_rows import (
    PANEL,
    VECTOR_BYTES,
    WORD_BYTES,
    Block,
    Piece,
    emit_prefetch,
    load_piece,
    load_twins,
    pieces,
    value_address,
)

TILE = 128
"""Keys between two corrections of the running maximum, counted from position 0 of a sequence."""

_LINE_BYTES = 64

CHAINS = 4
"""Sums that a product is made of."""

ACCUMULATORS = 24
"""Vectors of running sums that stay in registers; AVX-512 has thirty-two."""

_ROWS = 4
"""Keys that meet a block of queries at once, where they lie as rows."""


def _loop(builder: Any, begin: Any, end: Any, step: int) -> Any:
    return cgutils.for_range_slice(builder, begin, end, ir.Constant(begin.type, step))


def _emit_scores(
    builder: Any, block: Block, queries: Any, panel: Any, ahead: Any, output: Any, scale: Any
) -> None:
    kind = INTS if block.format is Format.BFLOAT16 else VECTOR
    per_line = block.format.itemsize // block.kept.itemsize
    zero, words = (ir.Constant(panel.type, number) for number in (0, block.words))
    sums = [
        [cgutils.alloca_once_value(builder, floats(0.0)) for _ in range(CHAINS)]
        for _ in range(block.queries)
    ]
    with _loop(builder, zero, words, CHAINS) as (first, _):
        word = builder.mul(first, ir.Constant(first.type, WORD_BYTES))
        line = builder.mul(first, ir.Constant(first.type, VECTOR_BYTES // per_line))
        vectors: list[Any] = []
        for chain in range(CHAINS):
            if chain % per_line == 0:
                place = at(builder, line, chain // per_line * VECTOR_BYTES)
                source = builder.add(panel, place)
                vectors += read_words(builder, block.format, block.kept, source)
                if block.once:
                    emit_prefetch(builder, builder.add(ahead, place))
            for query, chains in enumerate(sums):
                skipped = query * block.query_bytes + chain * WORD_BYTES
                factor = load(
                    builder, at(builder, builder.add(queries, word), skipped), kind.element
                )
                grown = multiply_add_words(
                    builder,
                    block.format,
                    splat(builder, factor),
                    vectors[chain],
                    builder.load(chains[chain]),
                )
                builder.store(grown, chains[chain])
    factor = splat(builder, scale)
    for query, chains in enumerate(sums):
        parts = [builder.load(slot) for slot in chains]
        while len(parts) > 1:
            parts = [builder.fadd(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        place = at(builder, output, query * TILE * WORD_BYTES)
        store(builder, builder.fmul(parts[0], factor), place)


def _emit_scores_of_rows(
    builder: Any, block: Block, queries: Any, rows: Any, output: Any, scale: Any
) -> None:
    kind = INTS if block.format is Format.BFLOAT16 else VECTOR
    zero, keys, size = (ir.Constant(rows.type, each) for each in (0, PANEL, block.head_bytes))
    sums = [
        [cgutils.alloca_once(builder, VECTOR) for _ in range(_ROWS)] for _ in range(block.queries)
    ]
    with _loop(builder, zero, keys, _ROWS) as (key, _):
        for slot in itertools.chain(*sums):
            builder.store(floats(0.0), slot)
        first = builder.add(rows, builder.mul(key, ir.Constant(key.type, block.kept_bytes)))
        with _loop(builder, zero, size, VECTOR_BYTES) as (place, _):
            source = builder.add(first, place)
            vectors = [
                load(builder, at(builder, source, row * block.kept_bytes), kind)
                for row in range(_ROWS)
            ]
            for query, slots in enumerate(sums):
                skipped = query * block.query_bytes
                words = load(builder, at(builder, builder.add(queries, place), skipped), kind)
                for vector, slot in zip(vectors, slots, strict=True):
                    grown = builder.load(slot)
                    grown = multiply_add_words(builder, block.format, words, vector, grown)
                    builder.store(grown, slot)
        column = builder.add(output, builder.mul(key, ir.Constant(key.type, WORD_BYTES)))
        for query, slots in enumerate(sums):
            for row, slot in enumerate(slots):
                product = builder.fmul(fold(builder, builder.load(slot), builder.fadd), scale)
                place = at(builder, column, query * TILE * WORD_BYTES + row * WORD_BYTES)
                builder.store(product, builder.inttoptr(place, FLOAT.as_pointer()))


def _emit_weigh(
    builder: Any,
    block: Block,
    weights: Any,
    panels: Any,
    values: Any,
    output: Any,
    begin: Any,
    end: Any,
    ahead_panels: Any,
    ahead: Any,
) -> None:
    """The loop over keys, once for each group of pieces whose sums fit into the registers."""
    keys, weight, form = 1, FLOAT, Format.FLOAT32
    first = begin
    if block.paired:
        keys, weight, form = 2, INT, Format.BFLOAT16
        first = builder.and_(begin, ir.Constant(begin.type, -2))
    room = max(ACCUMULATORS // block.queries, 2)
    groups: list[list[Piece]] = [[]]
    for piece in pieces(block):
        if sum(len(p.chunks) for p in groups[-1]) + len(piece.chunks) > room:
            groups.append([])
        groups[-1].append(piece)
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
        with _loop(builder, first, end, keys) as (key, _):
            address = value_address(builder, block, panels, values, key)
            if block.once and number == 0:
                needed = value_address(builder, block, ahead_panels, ahead, key)
                for line in range(0, keys * block.kept_bytes, _LINE_BYTES):
                    emit_prefetch(builder, at(builder, needed, line))
            skipped = builder.mul(key, ir.Constant(key.type, WORD_BYTES // keys))
            entry = builder.add(weights, skipped)
            factors = [
                splat(builder, load(builder, at(builder, entry, q * TILE * WORD_BYTES), weight))
                for q in range(block.queries)
            ]
            rows = [address]
            if block.paired:
                rows = _seen_of_two(builder, block, address, key, begin, end)
            slots = iter(sums)
            for piece in group:
                chunks = (
                    load_twins(builder, block, rows, piece)
                    if block.paired
                    else load_piece(builder, block, address, piece)
                )
                for chunk in chunks:
                    for factor in factors:
                        slot = next(slots)
                        total = builder.load(slot)
                        updated = multiply_add_words(builder, form, factor, chunk, total)
                        builder.store(updated, slot)
        for slot, place in zip(sums, places, strict=True):
            store(builder, builder.load(slot), at(builder, output, place))


def _seen_of_two(
    builder: Any, block: Block, address: Any, key: Any, begin: Any, end: Any
) -> list[Any]:
    """Where the values of an even key and the next lie, or zeros in place of one that is not seen:
    what it holds may be no number.
    """
    kind = ir.ArrayType(ir.IntType(8), block.kept_bytes)
    zeros = cgutils.global_constant(builder.module, "zeros", ir.Constant(kind, None))
    nothing = builder.ptrtoint(zeros, address.type)
    following = builder.add(key, ir.Constant(key.type, 1))
    return [
        builder.select(builder.icmp_signed(">=", key, begin), address, nothing),
        builder.select(
            builder.icmp_signed("<", following, end),
            at(builder, address, block.kept_bytes),
            nothing,
        ),
    ]


_WORD = types.int64


@intrinsic
def scores(
    typing: Any, block: Any, queries: Any, panel: Any, ahead: Any, output: Any, scale: Any
) -> Any:
    """Scores of a block of queries with the sixteen keys of a panel.

    Args:
        block: a `Block`.
        queries: address of its queries, as they lie in memory, one every `query_bytes`.
        panel: address of the keys, which lie as rows if they are latents.
        ahead: address of as much memory, which is sent for if the block's keys are read once.
        output: address of float32 [queries, TILE], of which sixteen columns are written.
        scale: float32 that products are multiplied by.
    """

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, queries, panel, ahead, output, scale = arguments
        if block.value.latent:
            _emit_scores_of_rows(builder, block.value, queries, panel, output, scale)
        else:
            _emit_scores(builder, block.value, queries, panel, ahead, output, scale)
        return context.get_dummy_value()

    return types.void(block, *([_WORD] * 4), types.float32), lower


@intrinsic
def weigh(
    typing: Any,
    block: Any,
    weights: Any,
    panels: Any,
    values: Any,
    output: Any,
    begin: Any,
    end: Any,
    ahead_panels: Any,
    ahead: Any,
) -> Any:
    """Adds the weighted values of keys `begin` .. `end` - 1 of a tile to a block's sums.

    Args:
        block: a `Block`.
        weights: address of float32 [queries, TILE], or of bfloat16 in the first half of each row.
        panels: address of int64 offsets in bytes, one for every sixteen keys of the tile.
        values: address that the offsets count from; sixteen values are rows in one piece.
        output: address of the sums, in scratch order, one every `state_bytes`.
        begin: first key.
        end: one past the last key.
        ahead_panels: with `ahead`, where what is needed next lies: as much is sent for, if the
            block's values are read once.
        ahead: see `ahead_panels`.
    """

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_weigh(builder, block.value, *arguments[1:])
        return context.get_dummy_value()

    return types.void(block, *([_WORD] * 8)), lower
