"""How keys, values and queries lie in memory and in the kernels' scratch.

Values lie in the pool as rows, one after the other. Keys lie in *panels*: the keys of sixteen
positions of a head, transposed, as a matrix product packs them (Goto and van de Geijn, ACM TOMS
34(3), 2008), [words, sixteen keys]; a word has 32 bits, one float32, two bfloat16 or four e4m3 of a
key. So they are transposed once, when they are written, and each lane of a vector is a key whenever
they are read. A panel is as large as the sixteen rows of values beside it.

Latents, which are keys and values at once, lie as rows, and are kept once.

In scratch a row of D numbers is held in *scratch order*: float32, in chunks of sixteen lanes,
zero-padded to whole chunks. A float32 row keeps its order. Thirty-two bfloat16 are read as sixteen
words whose lower halves make one chunk and whose upper halves the next, so that widening costs one
instruction a chunk; so are sixty-four e4m3, once they are such words. `store_row` puts the order
back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pagefleet_kernels.cpu_formats import (
    LOOKS_UP,
    in_order,
    narrowed,
    read,
    read_pairs,
    read_twins,
    write_pairs,
)
from pagefleet_kernels.cpu_ir import (
    INT,
    LANES,
    MULTIPLIES_BFLOAT16,
    Format,
    at,
    attribute_in_kernels,
    constant_in_kernels,
    intrinsic,
    load,
    lower_halves,
    shuffle,
    splat,
    store,
    upper_halves,
)

PANEL = LANES
"""Keys of a panel."""

_WORDS_OF_PAIRS = {
    Format.FLOAT32: (),
    Format.BFLOAT16: (2 * LANES,),
    Format.E4M3: (4 * LANES,) if LOOKS_UP else (),
}
"""How many numbers make vectors of such words."""

WORD_BYTES = 4
VECTOR_BYTES = LANES * WORD_BYTES
_PLACE_BYTES = 8
_WORD = types.int64


@dataclass(frozen=True)
class Block:
    """What an inner loop is compiled for: keys of `head_size` numbers, for `queries` queries at a
    time.
    """

    format: Format
    """Of queries, and of what comes of them."""
    kept: Format
    """Of keys and values: the same, or e4m3."""
    head_size: int
    queries: int
    once: bool = False
    """Whether keys and values are read once, so that what is read next is sent for on the way."""
    latent: int = 0
    """Of keys that are latents, how many numbers are the value; 0 if values lie beside keys."""

    @property
    def value_size(self) -> int:
        """Numbers of one value."""
        return self.latent or self.head_size

    @property
    def head_bytes(self) -> int:
        """Size of one query in memory."""
        return self.head_size * self.format.itemsize

    @property
    def output_bytes(self) -> int:
        """Size in memory of what comes of one query."""
        return self.value_size * self.format.itemsize

    @property
    def kept_bytes(self) -> int:
        """Size of one key or value in memory, or of both where they are one."""
        return self.head_size * self.kept.itemsize

    @property
    def scaled(self) -> bool:
        """Whether keys and values are kept over a scale."""
        return self.kept is Format.E4M3

    @property
    def paired(self) -> bool:
        """Whether values are weighted two keys at a time, by weights of 16 bits.

        With values of 8 bits it is arithmetic that takes the time, no longer memory, and their own
        rounding is 32 times as coarse as that of the weights.
        """
        return self.scaled and self.format is Format.BFLOAT16 and MULTIPLIES_BFLOAT16

    @property
    def words(self) -> int:
        """Words of one query in memory."""
        return self.head_bytes // WORD_BYTES

    @property
    def query_bytes(self) -> int:
        """Room for one query, in whole vectors of float32."""
        return -(-self.head_size // LANES) * VECTOR_BYTES

    @property
    def row_bytes(self) -> int:
        """Size of one value in scratch order."""
        return -(-self.value_size // LANES) * VECTOR_BYTES

    @property
    def state_bytes(self) -> int:
        """Size of one value in scratch order and a vector of other numbers about it."""
        return self.row_bytes + VECTOR_BYTES

    @property
    def single(self) -> "Block":
        """The same for one query."""
        return Block(self.format, self.kept, self.head_size, 1, latent=self.latent)


constant_in_kernels(Block)


for _name in (
    "queries",
    "head_bytes",
    "output_bytes",
    "kept_bytes",
    "query_bytes",
    "row_bytes",
    "state_bytes",
    "single",
    "once",
    "scaled",
    "paired",
):
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
    """A value cut into what is loaded as words of two bfloat16, chunks, and half a chunk."""
    pieces, begin = [], 0
    sizes = [*_WORDS_OF_PAIRS[block.kept], 16, 8]
    while begin < block.value_size:
        size = next(size for size in sizes if size <= block.value_size - begin)
        pieces.append(Piece(begin, size))
        begin += size
    return pieces


def load_piece(builder: Any, block: Block, address: Any, piece: Piece) -> list[Any]:
    """The chunks of a piece of the value at `address`, widened to float32."""
    place = at(builder, address, piece.begin * block.kept.itemsize)
    if piece.size > LANES:
        words = read_pairs(builder, block.kept, place)
        return [half(builder, each) for each in words for half in (lower_halves, upper_halves)]
    return [read(builder, block.kept, place, piece.size)]


def load_twins(builder: Any, block: Block, addresses: Sequence[Any], piece: Piece) -> list[Any]:
    """A piece of the values of two keys, as words of two bfloat16: one of each."""
    places = [at(builder, address, piece.begin) for address in addresses]
    return read_twins(builder, places, piece.size)


def store_piece(builder: Any, block: Block, address: Any, piece: Piece, chunks: list[Any]) -> None:
    """The inverse of `load_piece`, or of `load_twins`; rounds to the type of queries."""
    place = at(builder, address, piece.begin * block.format.itemsize)
    if piece.size > LANES and block.paired:
        for number, chunk in enumerate(in_order(builder, chunks)):
            stored = narrowed(builder, block.format, chunk)
            store(builder, stored, at(builder, place, number * LANES * block.format.itemsize))
        return
    if piece.size > LANES:
        for lower, upper in zip(chunks[::2], chunks[1::2], strict=True):
            write_pairs(builder, block.format, place, lower, upper)
            place = at(builder, place, 2 * LANES * block.format.itemsize)
        return
    stored = narrowed(builder, block.format, chunks[0])
    if piece.size < LANES:
        stored = shuffle(builder, stored, stored, list(range(piece.size)))
    store(builder, stored, place)


def value_address(builder: Any, block: Block, panels: Any, values: Any, key: Any) -> Any:
    """Where the value of key number `key` of a tile lies: see `cpu_tiles.weigh`."""

    def constant(number: int) -> Any:
        return ir.Constant(key.type, number)

    entry = builder.mul(builder.lshr(key, constant(4)), constant(_PLACE_BYTES))
    place = load(builder, builder.add(panels, entry), ir.IntType(64))
    row = builder.mul(builder.and_(key, constant(PANEL - 1)), constant(block.kept_bytes))
    return builder.add(builder.add(values, place), row)


def emit_prefetch(builder: Any, address: Any) -> None:
    """Sends for the cache line at an address before it is needed; any address will do.

    Into the second-level cache, which keeps more requests under way than the first.
    """
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INT, INT, INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, second_level, data = INT(0), INT(2), INT(1)
    builder.call(function, [builder.inttoptr(address, byte), read, second_level, data])


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """See `emit_prefetch`."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit_prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(_WORD), lower


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
