"""Paged attention on the CPU, for decode steps, prefill chunks and any mix of them.

The queries of one key/value head (grouped query heads, Ainslie et al., EMNLP 2023) read its keys
and values together, tile by tile, with an online softmax (Milakov and Gimelshein, 2018; as in
FlashAttention, Dao et al., NeurIPS 2022, algorithm 1): within a tile of TILE positions the weights
are taken against the tile's own maximum; then the tile's sums are merged into the query's state.

The exactness rule: a token's output has the same bits in every batch, in every chunk, on any number
of threads, hit or miss. It holds because
  - tiles lie at fixed positions of the sequence, counted from 0, whatever the chunk;
  - keys and values always come back from the pool, never from the step's own tensors;
  - every tile is summed from nothing and merged by the same formula, in order: then it does not
    matter whether one thread went through all tiles or several took one each (a long context of a
    decode step is split so, as flash-decoding does; the last to finish merges);
  - the queries beside a query share loads with it, never arithmetic (see `cpu_tiles`).
"""

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from numba import carray
from torch import Tensor

from pagefleet_kernels import reference
from pagefleet_kernels.cpu_cache import (
    block_bytes,
    computed_in,
    dense_heads,
    in_panels,
    is_kept,
    latent_of,
)
from pagefleet_kernels.cpu_ir import device
from pagefleet_kernels.cpu_launch import (
    FORMATS,
    KEPT,
    Kernel,
    Scratch,
    address_of,
    fields,
    next_task,
    thread_number,
)
from pagefleet_kernels.cpu_online_softmax import (
    Head,
    Room,
    attend_block,
    layout,
    merge,
    room_size,
    score,
    visible,
)
from pagefleet_kernels.cpu_rows import PANEL, Block, store_row
from pagefleet_kernels.cpu_simd import (
    broadcast,
    copy_bytes,
    exp,
    fetch_add,
    first,
    load_float,
    load_int32,
    store_float,
    store_floats,
    store_int64,
)
from pagefleet_kernels.cpu_tasks import Cursor, Task, seek
from pagefleet_kernels.cpu_tiles import ACCUMULATORS, CHAINS, TILE

_QUERIES = 48
"""Queries of one task, as near as whole tokens allow."""


class Arguments(ctypes.Structure):
    """What `attention` hands to the compiled code; addresses and strides are in bytes."""

    _fields_ = fields(
        "query query_stride output keys values block_bytes tables table_stride starts offsets rows "
        "kv_scales heads group padded block_size tokens_per_task capacity window slopes sinks "
        "rooms room_size partials partial_size arrivals",
        "scale softcap",
    )


@device
def _find_panels(block: Any, arguments: Any, task: Task, tile: int, panels: int) -> None:
    """Where the panels of a tile lie in the first head, through the block table."""
    count = min(task.position + task.tokens - tile * TILE, TILE)
    table = arguments.tables + task.row * arguments.table_stride
    for panel in range(-(-count // PANEL)):
        index, slot = divmod(tile * TILE + panel * PANEL, arguments.block_size)
        place = load_int32(table + index * 4) * arguments.block_bytes + slot * block.kept_bytes
        store_int64(panels + panel * 8, place)


@device
def _head(block: Any, arguments: Any, number: int, room: Room) -> Head:
    skipped = number * arguments.block_size * block.kept_bytes
    keys, values = arguments.keys + skipped, arguments.values + skipped
    scale = arguments.scale
    if block.scaled:
        scale *= load_float(arguments.kv_scales + number * 4)
    return Head(number, keys, values, scale, keys, room.ahead_panels)


@device
def _load_queries(block: Any, arguments: Any, task: Task, head: int, queries: int) -> None:
    """The queries of a task for one head, filled up to whole blocks with zeros."""
    group, count = arguments.group, task.tokens * arguments.group
    for query in range(-(-count // block.queries) * block.queries):
        target = queries + query * block.query_bytes
        if query < count:
            source = arguments.query + (task.token + query // group) * arguments.query_stride
            source += (head * group + query % group) * block.head_bytes
            copy_bytes(target, source, block.head_bytes)
        else:
            for place in range(0, block.query_bytes, 64):
                store_floats(target + place, broadcast(0.0))


@device
def _finish(block: Any, arguments: Any, task: Task, head: int, states: int) -> None:
    """Divides the sums of a task's queries by their totals, into the output. A sink comes to the
    total here, once, whatever parts the sums were made of.
    """
    group, scale = arguments.group, 1.0
    if block.scaled:
        scale = load_float(arguments.kv_scales + (arguments.heads + head) * 4)
    for query in range(task.tokens * group):
        token, number = task.token + query // group, head * group + query % group
        target = arguments.output + (token * arguments.heads * group + number) * block.output_bytes
        state = states + query * block.state_bytes
        weight = load_float(state + block.row_bytes + 4)
        if arguments.sinks:
            sink = load_float(arguments.sinks + number * 4)
            weight += first(exp(broadcast(sink - load_float(state + block.row_bytes))))
        store_row(block, state, target, weight / scale)


@device
def _attend_chunk(block: Any, arguments: Any, task: Task, head: Head, room: Room) -> None:
    """Some tokens of a row over all that they see, for one head."""
    queries = task.tokens * arguments.group
    _load_queries(block, arguments, task, head.number, room.queries)
    for query in range(queries):
        store_float(room.states + query * block.state_bytes + block.row_bytes + 4, 0.0)
    for tile in range(task.first_tile, task.last_tile):
        _find_panels(block, arguments, task, tile, room.panels)
        for query in range(0, queries, block.queries):
            _attend_tile(block, arguments, task, head, room, tile, query)
    _finish(block, arguments, task, head.number, room.states)


@device
def _attend_tile(
    block: Any, arguments: Any, task: Task, head: Head, room: Room, tile: int, query: int
) -> None:
    """One tile for the block of queries from `query` on, merged into their states."""
    begin = visible(arguments, task, tile, query)[0]
    end = visible(arguments, task, tile, query + block.queries - 1)[1]
    if begin >= end:
        return
    for panel in range(begin // PANEL, -(-end // PANEL)):
        queries = room.queries + query * block.query_bytes
        score(block, arguments, head, room, panel, queries, room.weights)
    attend_block(block, arguments, task, head, room, tile, query, room.weights, room.fresh)
    for index in range(block.queries):
        low, high = visible(arguments, task, tile, query + index)
        if low < high:
            state = room.states + (query + index) * block.state_bytes
            merge(block, state, room.fresh + index * block.state_bytes)


@device
def _attend_token(
    block: Any, arguments: Any, task: Task, following: Task, room: Room, states: int
) -> None:
    """One tile of a decode row for all heads, into `states`.

    First come all scores, panel by panel, because so keys lie in memory, and their values are sent
    for; while these are summed, the keys of the `following` task are sent for.
    """
    tile, heads, padded = task.first_tile, arguments.heads, arguments.padded
    _find_panels(block, arguments, task, tile, room.panels)
    if following.tokens:
        _find_panels(block, arguments, following, following.first_tile, room.ahead_panels)
    for number in range(heads):
        queries = room.queries + number * padded * block.query_bytes
        _load_queries(block, arguments, task, number, queries)
    begin, end = visible(arguments, task, tile, 0)
    for panel in range(begin // PANEL, -(-end // PANEL)):
        for number in range(heads):
            head = _head(block, arguments, number, room)
            for query in range(number * padded, (number + 1) * padded, block.queries):
                queries = room.queries + query * block.query_bytes
                weights = room.weights + query * TILE * 4
                score(block, arguments, head, room, panel, queries, weights)
    for number in range(heads):
        head = _head(block, arguments, number, room)
        for query in range(0, padded, block.queries):
            place = number * padded + query
            weights, own = room.weights + place * TILE * 4, states + place * block.state_bytes
            attend_block(block, arguments, task, head, room, tile, query, weights, own)


@device
def _gather(block: Any, arguments: Any, task: Task, partials: int, tiles: int) -> None:
    """Counts a tile of a decode row as done; whoever finishes the last merges all, in order."""
    arrivals = arguments.arrivals + task.row * 8
    if fetch_add(arrivals, 1) + 1 < tiles:
        return
    store_int64(arrivals, 0)
    for tile in range(1, tiles):
        for query in range(arguments.heads * arguments.padded):
            state = partials + query * block.state_bytes
            merge(block, state, state + tile * arguments.partial_size)
    for number in range(arguments.heads):
        states = partials + number * arguments.padded * block.state_bytes
        _finish(block, arguments, task, number, states)


@device
def run_attention(narrow: Any, wide: Any, arguments: Any) -> None:
    """Takes tasks until there are none left, each a little before it is needed."""
    own = arguments.rooms + thread_number(arguments) * arguments.room_size
    room = layout(wide, own, arguments.capacity)
    origin = Cursor(0, 0, 0, arguments.partials, False, 0, Task(0, 0, 0, 0, 0, 0))
    cursor = seek(arguments, origin, next_task(arguments))
    while cursor.task.tokens:
        following = seek(arguments, cursor, next_task(arguments))
        task = cursor.task
        if cursor.decode:
            states = cursor.partials + cursor.part * arguments.partial_size
            _attend_token(narrow, arguments, task, following.task, room, states)
            _gather(narrow, arguments, task, cursor.partials, cursor.tasks)
        else:
            _attend_chunk(wide, arguments, task, _head(wide, arguments, cursor.part, room), room)
        cursor = following


class Shape(NamedTuple):
    """What follows from a model's shape alone."""

    narrow: Block
    """Of decode rows."""
    wide: Block
    """Of chunks."""
    group: int
    padded: int
    """Queries of a decode row and a head, in whole blocks."""
    tokens_per_task: int
    capacity: int
    room_size: int
    partial_size: int

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        head_size: int,
        query_heads: int,
        heads: int,
        latent: int = 0,
    ) -> "Shape":
        """How heads of `head_size` are computed, over a pool of `kv_dtype`; for `latent` see
        `Block`.
        """
        group, form, kept = query_heads // heads, FORMATS[dtype], KEPT[kv_dtype]
        few = -(-group // -(-group // 4))
        narrow = Block(form, kept, head_size, few, once=True, latent=latent)
        wide = Block(form, kept, head_size, ACCUMULATORS // CHAINS, latent=latent)
        tokens_per_task = max(_QUERIES // group, 1)
        padded = -(-group // narrow.queries) * narrow.queries
        capacity = max(tokens_per_task * group + wide.queries, heads * padded)
        return cls(
            narrow,
            wide,
            group,
            padded,
            tokens_per_task,
            capacity,
            room_size(wide, capacity),
            heads * padded * narrow.state_bytes,
        )

    def scratch(self, threads: int, rows: int, slots: int) -> tuple[int, int, int]:
        """Addresses of rooms, partials and arrivals for a step of `rows` over tables of `slots`."""
        splits = -(-slots // TILE)
        return (
            _scratch.address("rooms", self.room_size * threads),
            _scratch.address("partials", rows * splits * self.partial_size),
            _scratch.address("arrivals", rows * 8),
        )


_shape = functools.cache(Shape.of)


@functools.cache
def _kernel(narrow: Block, wide: Block) -> Kernel:
    """The compiled kernel for a shape."""

    def attention_kernel(pointer: Any) -> None:
        run_attention(narrow, wide, carray(pointer, 1)[0])

    return Kernel(attention_kernel, Arguments)


_scratch = Scratch()


def warm_up(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    query_heads: int,
    heads: int,
    head_size: int,
    latent: int = 0,
) -> None:
    """Compiles what `attention` needs for a model, or loads it; seconds or milliseconds."""
    if is_kept(kv_dtype, head_size, latent):
        sizes = head_size, query_heads, heads, latent
        shape = _shape(computed_in(dtype, kv_dtype), kv_dtype, *sizes)
        _kernel(shape.narrow, shape.wide)


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
) -> Tensor:
    """`reference.attention`, compiled, over caches that are `in_panels`, or latents; other caches
    go to the reference. Queries are `computed_in` a type that suits the caches.
    """
    latent = latent_of(key_cache, value_cache)
    if not in_panels(key_cache, latent):
        return reference.attention(
            query, key_cache, value_cache, tables, starts, offsets,
            scale=scale, window=window, softcap=softcap,
            slopes=slopes, sinks=sinks, kv_scales=kv_scales,
        )  # fmt: skip
    _, heads, block_size, head_size = key_cache.shape
    rows, width = tables.shape
    queries = dense_heads(query.to(computed_in(query.dtype, key_cache.dtype)))
    tables = tables.contiguous()
    shape = _shape(queries.dtype, key_cache.dtype, head_size, queries.shape[1], heads, latent)
    threads, itemsize = torch.get_num_threads(), queries.element_size()
    rooms, partials, arrivals = shape.scratch(threads, rows, width * block_size)
    output = queries.new_empty(*queries.shape[:2], value_cache.shape[3])
    distance = block_bytes(key_cache, key_cache if latent else value_cache)
    _kernel(shape.narrow, shape.wide)(
        threads,
        queries.data_ptr(), queries.stride(0) * itemsize, output.data_ptr(),
        key_cache.data_ptr(), value_cache.data_ptr(), distance,
        tables.data_ptr(), tables.stride(0) * 4, starts.data_ptr(), offsets.data_ptr(), rows,
        address_of(kv_scales), heads,
        shape.group, shape.padded, block_size, shape.tokens_per_task, shape.capacity,
        window, address_of(slopes), address_of(sinks),
        rooms, shape.room_size, partials, shape.partial_size, arrivals,
        scale, softcap,
    )  # fmt: skip
    return output.to(query.dtype)
