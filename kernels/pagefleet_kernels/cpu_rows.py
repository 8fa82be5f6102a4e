"""Rows of numbers in memory and in the kernels' scratch.

A row of D numbers is held in *scratch order*: float32, in chunks of sixteen lanes, zero-padded to
whole chunks. A float32 row keeps its order. Thirty-two bfloat16 are read as sixteen 32-bit words
whose lower halves make one chunk and whose upper halves the next, so that widening costs one
instruction a chunk; a sum over lanes does not care, and `store_row` puts the order back.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pagefleet_kernels.cpu_ir import (
    HALVES,
    INT,
    INTS,
    LANES,
    MULTIPLIES_BFLOAT16,
    VECTOR,
    Format,
    at,
    attribute_in_kernels,
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

FLOAT_BYTES = 4
VECTOR_BYTES = LANES * FLOAT_BYTES
_OFFSET_BYTES = 8
_WORD = types.int64


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
    def paired(self) -> bool:
        """Whether queries and keys are multiplied as they lie, two bfloat16 at a time."""
        whole = self.head_size % (2 * LANES) == 0
        return MULTIPLIES_BFLOAT16 and self.format is Format.BFLOAT16 and whole

    @property
    def head_bytes(self) -> int:
        """Size of one row in memory."""
        return self.head_size * self.format.itemsize

    @property
    def row_bytes(self) -> int:
        """Size of one row in scratch order."""
        return self.chunks * VECTOR_BYTES

    @property
    def state_bytes(self) -> int:
        """Size of one row in scratch order and a vector of other numbers about it."""
        return self.row_bytes + VECTOR_BYTES

    @property
    def single(self) -> "Block":
        """The same for one query."""
        return Block(self.format, self.head_size, 1)


constant_in_kernels(Block)


for _name in ("queries", "head_bytes", "row_bytes", "state_bytes", "single", "packed", "paired"):
    attribute_in_kernels(_name)


@dataclass(frozen=True)
class Piece:
    """A part of a row that is loaded at once: `size` numbers from number `begin` on."""

    begin: int
    size: int

    @property
    def chunks(self) -> range:
        """The chunks it fills."""
        return range(self.begin // LANES, -(-(self.begin + self.size) // LANES))


def pieces(block: Block) -> list[Piece]:
    """The row cut into pairs of chunks (bfloat16 only), chunks, and half a chunk."""
    pieces, begin = [], 0
    sizes = (32, 16, 8) if block.format is Format.BFLOAT16 else (16, 8)
    while begin < block.head_size:
        size = next(size for size in sizes if size <= block.head_size - begin)
        pieces.append(Piece(begin, size))
        begin += size
    return pieces


def load_piece(builder: Any, block: Block, address: Any, piece: Piece) -> list[Any]:
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


def load_keys(builder: Any, block: Block, address: Any, piece: Piece) -> list[tuple[int, Any]]:
    """What a piece of a key is multiplied as, numbered: its chunks, or all its pairs at once."""
    if block.paired:
        place = at(builder, address, piece.begin * block.format.itemsize)
        return [(piece.begin // piece.size, load(builder, place, INTS))]
    return list(zip(piece.chunks, load_piece(builder, block, address, piece), strict=True))


def store_piece(builder: Any, block: Block, address: Any, piece: Piece, chunks: list[Any]) -> None:
    """The inverse of `load_piece`; rounds to the type in memory."""
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


def row_address(builder: Any, offsets: Any, cache: Any, key: Any) -> Any:
    """Where key number `key` of a tile lies: `cache` plus its entry of `offsets`."""
    entry = builder.add(offsets, builder.mul(key, ir.Constant(key.type, _OFFSET_BYTES)))
    return builder.add(cache, load(builder, entry, ir.IntType(64)))


def emit_prefetch(builder: Any, block: Block, row: Any) -> None:
    """Sends for the row at an address before it is needed; any address will do.

    Into the second-level cache, which keeps more requests under way than the first.
    """
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_level, data = INT(0), INT(2), INT(1)
    for line in range(0, block.head_bytes, 64):
        line_address = builder.inttoptr(at(builder, row, line), byte)
        builder.call(function, [line_address, read, second_level, data])


@intrinsic
def prefetch(typing: Any, block: Any, offsets: Any, rows: Any) -> Any:
    """Sends for sixteen rows, at `rows` + `offsets`."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, offsets, rows = arguments
        for key in range(LANES):
            row = row_address(builder, offsets, rows, ir.Constant(ir.IntType(64), key))
            emit_prefetch(builder, block.value, row)
        return context.get_dummy_value()

    return types.void(block, _WORD, _WORD), lower


@intrinsic
def load_query(typing: Any, block: Any, source: Any, scratch: Any) -> Any:
    """One row from memory, as keys are multiplied (`load_keys`): in scratch order, or as it is."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, scratch = arguments
        for piece in pieces(block.value):
            for number, values in load_keys(builder, block.value, source, piece):
                store(builder, values, at(builder, scratch, number * VECTOR_BYTES))
        return context.get_dummy_value()

    return types.void(block, _WORD, _WORD), lower


@intrinsic
def store_row(typing: Any, block: Any, scratch: Any, target: Any, divisor: Any) -> Any:
    """One row out of scratch order, divided by the float32 `divisor`, to memory."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, scratch, target, divisor = arguments
        divisors = splat(builder, divisor)
        for piece in pieces(block.value):
            chunks = [
                builder.fdiv(load(builder, at(builder, scratch, chunk * VECTOR_BYTES)), divisors)
                for chunk in piece.chunks
            ]
            store_piece(builder, block.value, target, piece, chunks)
        return context.get_dummy_value()

    return types.void(block, _WORD, _WORD, types.float32), lower
