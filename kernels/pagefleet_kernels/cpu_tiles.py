"""The inner loops of attention on the CPU: several queries of one key/value head against keys.

A row of D numbers is held in *scratch order*: float32, in chunks of sixteen lanes, zero-padded to
whole chunks. A float32 row keeps its order. Thirty-two bfloat16 are read as sixteen 32-bit words
whose lower halves make one chunk and whose upper halves the next, so that widening costs one
instruction a chunk; a sum over lanes does not care, and `store_row` puts the order back.

Two routines compute scores, and they must agree to the last bit, because a token's result may not
depend on how many others came with it (decode against prefill):

    `scores`         keys as they lie in the pool. The lanes of a product are summed chunk after
                     chunk, then folded by halves (l with l + 8, l + 4, l + 2, l + 1); sixteen keys
                     are folded together, as one transposition that adds.
    `packed_scores`  keys transposed once by `pack` and used by many queries, as a matrix product
                     does (Goto and van de Geijn, ACM TOMS 34(3), 2008). One lane is one key, so
                     the same sum is spelled out: sixteen partial sums, added in the same tree.

`weigh` adds weighted values key by key, in ascending order; queries never mix in it, so any number
of them may share the values that it loads.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pagefleet_kernels.cpu_simd import (
    FLOAT,
    HALVES,
    INT,
    INTS,
    LANES,
    VECTOR,
    Format,
    at,
    attribute_in_kernels,
    call,
    constant_in_kernels,
    intrinsic,
    ints,
    load,
    rounded_bits,
    shuffle,
    splat,
    store,
    widen,
)

TILE = 128
"""Keys between two corrections of the running maximum, counted from position 0 of a sequence."""

_ACCUMULATORS = 24
"""Vectors of running sums that stay in registers; AVX-512 has thirty-two."""

_FLOAT_BYTES = 4
_VECTOR_BYTES = LANES * _FLOAT_BYTES
_OFFSET_BYTES = 8


@dataclass(frozen=True)
class Block:
    """What an inner loop is compiled for: rows of `head_size` numbers in `format`, for `queries`
    queries at a time.
    """

    format: Format
    head_size: int
    queries: int
    packed: bool = False
    """Whether scores come from panels."""

    @property
    def chunks(self) -> int:
        """Vectors that hold one row."""
        return -(-self.head_size // LANES)

    @property
    def head_bytes(self) -> int:
        """Size of one row in memory."""
        return self.head_size * self.format.itemsize

    @property
    def row_bytes(self) -> int:
        """Size of one row in scratch order."""
        return self.chunks * _VECTOR_BYTES

    @property
    def state_bytes(self) -> int:
        """Size of one row in scratch order and a vector of other numbers about it."""
        return self.row_bytes + _VECTOR_BYTES

    @property
    def single(self) -> "Block":
        """The same for one query."""
        return Block(self.format, self.head_size, 1)


constant_in_kernels(Block)


for _name in ("queries", "head_bytes", "row_bytes", "state_bytes", "single", "packed"):
    attribute_in_kernels(_name)


@dataclass(frozen=True)
class _Piece:
    """A part of a row that is loaded at once: `size` numbers from number `begin` on."""

    begin: int
    size: int

    @property
    def chunks(self) -> range:
        """The chunks it fills."""
        return range(self.begin // LANES, -(-(self.begin + self.size) // LANES))


def _pieces(block: Block) -> list[_Piece]:
    """The row cut into pairs of chunks (bfloat16 only), chunks, and half a chunk."""
    pieces, begin = [], 0
    sizes = (32, 16, 8) if block.format is Format.BFLOAT16 else (16, 8)
    while begin < block.head_size:
        size = next(size for size in sizes if size <= block.head_size - begin)
        pieces.append(_Piece(begin, size))
        begin += size
    return pieces


def _load_piece(builder: Any, block: Block, address: Any, piece: _Piece) -> list[Any]:
    """The chunks of a piece of the row at `address`, widened to float32."""
    place = at(builder, address, piece.begin * block.format.itemsize)
    if piece.size == 2 * LANES:
        words = load(builder, place, INTS)
        upper = builder.and_(words, ints(-0x10000))
        return [
            builder.bitcast(builder.shl(words, ints(16)), VECTOR),
            builder.bitcast(upper, VECTOR),
        ]
    lane = VECTOR.element if block.format is Format.FLOAT32 else HALVES.element
    values = load(builder, place, ir.VectorType(lane, piece.size))
    if piece.size < LANES:
        zeros = ir.Constant(ir.VectorType(lane, piece.size), None)
        values = shuffle(builder, values, zeros, list(range(LANES)))
    return [values if block.format is Format.FLOAT32 else widen(builder, values)]


def _store_piece(
    builder: Any, block: Block, address: Any, piece: _Piece, chunks: list[Any]
) -> None:
    """The inverse of `_load_piece`; rounds to the type in memory."""
    place = at(builder, address, piece.begin * block.format.itemsize)
    if block.format is Format.FLOAT32:
        stored = chunks[0]
    elif piece.size == 2 * LANES:
        lower, upper = (rounded_bits(builder, chunk) for chunk in chunks)
        stored = builder.or_(builder.lshr(lower, ints(16)), builder.and_(upper, ints(-0x10000)))
    else:
        bits = builder.lshr(rounded_bits(builder, chunks[0]), ints(16))
        stored = builder.trunc(bits, HALVES)
    if piece.size < LANES:
        stored = shuffle(builder, stored, stored, list(range(piece.size)))
    store(builder, stored, place)


def _row_address(builder: Any, offsets: Any, cache: Any, key: Any) -> Any:
    """Where key number `key` of a tile lies: `cache` plus its entry of `offsets`."""
    entry = builder.add(offsets, builder.mul(key, ir.Constant(key.type, _OFFSET_BYTES)))
    return builder.add(cache, load(builder, entry, ir.IntType(64)))


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


def _emit_scores(
    builder: Any, block: Block, queries: Any, offsets: Any, keys: Any, output: Any
) -> None:
    def products(leaf: int) -> list[Any]:
        key = ir.Constant(ir.IntType(64), 4 * (leaf % 4) + leaf // 4)
        address = _row_address(builder, offsets, keys, key)
        sums: list[Any] = [None] * block.queries
        for piece in _pieces(block):
            chunks = _load_piece(builder, block, address, piece)
            for chunk, values in zip(piece.chunks, chunks, strict=True):
                for query in range(block.queries):
                    place = query * block.row_bytes + chunk * _VECTOR_BYTES
                    factor = load(builder, at(builder, queries, place))
                    sums[query] = (
                        builder.fmul(factor, values)
                        if chunk == 0
                        else call(builder, "fma", factor, values, sums[query])
                    )
        return sums

    def folded(leaf: int, width: int) -> list[Any]:
        """The leaves `leaf` .. `leaf` + 16 / width - 1, each folded to `width` lanes."""
        if width == LANES:
            return products(leaf)
        halves = (folded(leaf, 2 * width), folded(leaf + LANES // (2 * width), 2 * width))
        return [
            _fold_together(builder, list(rows), 2 * width) for rows in zip(*halves, strict=True)
        ]

    for query, row in enumerate(folded(0, 1)):
        store(builder, row, at(builder, output, query * TILE * _FLOAT_BYTES))


def _emit_packed_scores(builder: Any, block: Block, queries: Any, panel: Any, output: Any) -> None:
    def products(lane: int) -> list[Any]:
        sums: list[Any] = [None] * block.queries
        for chunk in range(block.chunks):
            number = chunk * LANES + lane
            values = load(builder, at(builder, panel, number * _VECTOR_BYTES))
            for query in range(block.queries):
                place = query * block.row_bytes + number * _FLOAT_BYTES
                factor = splat(builder, load(builder, at(builder, queries, place), FLOAT))
                sums[query] = (
                    builder.fmul(factor, values)
                    if chunk == 0
                    else call(builder, "fma", factor, values, sums[query])
                )
        return sums

    def folded(lane: int, stride: int) -> list[Any]:
        if stride == LANES:
            return products(lane)
        halves = (folded(lane, 2 * stride), folded(lane + stride, 2 * stride))
        return [builder.fadd(left, right) for left, right in zip(*halves, strict=True)]

    for query, row in enumerate(folded(0, 1)):
        store(builder, row, at(builder, output, query * TILE * _FLOAT_BYTES))


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
        _row_address(builder, offsets, keys, ir.Constant(word, key)) for key in range(LANES)
    ]
    for piece in _pieces(block):
        loaded = [_load_piece(builder, block, address, piece) for address in addresses]
        for index, chunk in enumerate(piece.chunks):
            columns = _transposed(builder, [chunks[index] for chunks in loaded])
            for lane, column in enumerate(columns):
                number = chunk * LANES + lane
                store(builder, column, at(builder, panel, number * _VECTOR_BYTES))


def _emit_weigh(
    builder: Any,
    block: Block,
    weights: Any,
    offsets: Any,
    values: Any,
    output: Any,
    begin: Any,
    end: Any,
) -> None:
    """The loop over keys, once for each group of pieces whose sums fit into the registers."""
    room = max(_ACCUMULATORS // block.queries, 2)
    groups: list[list[_Piece]] = [[]]
    for piece in _pieces(block):
        if sum(len(p.chunks) for p in groups[-1]) + len(piece.chunks) > room:
            groups.append([])
        groups[-1].append(piece)
    one = ir.Constant(begin.type, 1)
    for group in groups:
        places = [
            query * block.state_bytes + chunk * _VECTOR_BYTES
            for piece in group
            for chunk in piece.chunks
            for query in range(block.queries)
        ]
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in places]
        for slot, place in zip(sums, places, strict=True):
            builder.store(load(builder, at(builder, output, place)), slot)
        with cgutils.for_range_slice(builder, begin, end, one) as (key, _):
            address = _row_address(builder, offsets, values, key)
            entry = builder.add(weights, builder.mul(key, ir.Constant(key.type, _FLOAT_BYTES)))
            factors = [
                splat(builder, load(builder, at(builder, entry, q * TILE * _FLOAT_BYTES), FLOAT))
                for q in range(block.queries)
            ]
            slots = iter(sums)
            for piece in group:
                for chunk in _load_piece(builder, block, address, piece):
                    for factor in factors:
                        slot = next(slots)
                        updated = call(builder, "fma", factor, chunk, builder.load(slot))
                        builder.store(updated, slot)
        for slot, place in zip(sums, places, strict=True):
            store(builder, builder.load(slot), at(builder, output, place))


_WORD = types.int64


@intrinsic
def scores(typing: Any, block: Any, queries: Any, offsets: Any, keys: Any, output: Any) -> Any:
    """Scores of a block of queries with the sixteen keys at `keys` + `offsets`.

    Args:
        block: a `Block`.
        queries: address of its queries in scratch order.
        offsets: address of sixteen int64 offsets in bytes.
        keys: address that the offsets count from.
        output: address of float32 [queries, TILE], of which sixteen columns are written.
    """

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_scores(builder, block.value, *arguments[1:])
        return context.get_dummy_value()

    return types.void(block, _WORD, _WORD, _WORD, _WORD), lower


@intrinsic
def packed_scores(typing: Any, block: Any, queries: Any, panel: Any, output: Any) -> Any:
    """As `scores`, bit for bit, with the sixteen keys of a `panel`."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_packed_scores(builder, block.value, *arguments[1:])
        return context.get_dummy_value()

    return types.void(block, _WORD, _WORD, _WORD), lower


@intrinsic
def pack(typing: Any, block: Any, offsets: Any, keys: Any, panel: Any) -> Any:
    """Transposes sixteen keys into a panel: float32 [numbers in scratch order, 16 keys]."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_pack(builder, block.value, *arguments[1:])
        return context.get_dummy_value()

    return types.void(block, _WORD, _WORD, _WORD), lower


@intrinsic
def prefetch(typing: Any, block: Any, offsets: Any, rows: Any) -> Any:
    """Sends for sixteen rows, at `rows` + `offsets`, before they are needed.

    Into the second-level cache, which keeps more requests under way than the first: blocks in
    random order then arrive 1.7 times as fast.
    """

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, offsets, rows = arguments
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, second_level, data = INT(0), INT(2), INT(1)
        for key in range(LANES):
            row = _row_address(builder, offsets, rows, ir.Constant(ir.IntType(64), key))
            for line in range(0, block.value.head_bytes, 64):
                line_address = builder.inttoptr(at(builder, row, line), byte)
                builder.call(function, [line_address, read, second_level, data])
        return context.get_dummy_value()

    return types.void(block, _WORD, _WORD), lower


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
    """

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_weigh(builder, block.value, *arguments[1:])
        return context.get_dummy_value()

    return types.void(block, *([_WORD] * 6)), lower


@intrinsic
def load_row(typing: Any, block: Any, source: Any, scratch: Any, factor: Any) -> Any:
    """One row from memory, times the float32 `factor`, into scratch order."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, scratch, factor = arguments
        factors = splat(builder, factor)
        for piece in _pieces(block.value):
            chunks = _load_piece(builder, block.value, source, piece)
            for chunk, values in zip(piece.chunks, chunks, strict=True):
                place = at(builder, scratch, chunk * _VECTOR_BYTES)
                store(builder, builder.fmul(values, factors), place)
        return context.get_dummy_value()

    return types.void(block, _WORD, _WORD, types.float32), lower


@intrinsic
def store_row(typing: Any, block: Any, scratch: Any, target: Any, divisor: Any) -> Any:
    """One row out of scratch order, divided by the float32 `divisor`, to memory."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, scratch, target, divisor = arguments
        divisors = splat(builder, divisor)
        for piece in _pieces(block.value):
            chunks = [
                builder.fdiv(load(builder, at(builder, scratch, chunk * _VECTOR_BYTES)), divisors)
                for chunk in piece.chunks
            ]
            _store_piece(builder, block.value, target, piece, chunks)
        return context.get_dummy_value()

    return types.void(block, _WORD, _WORD, types.float32), lower
