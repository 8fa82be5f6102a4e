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
import math
from typing import Any, NamedTuple

import torch
from numba import carray
from torch import Tensor

from pagefleet_kernels import reference
from pagefleet_kernels.cpu_launch import Kernel, Scratch, fields, next_task, thread_number
from pagefleet_kernels.cpu_simd import (
    Format,
    add,
    broadcast,
    device,
    divide,
    exp,
    fetch_add,
    first,
    keep,
    largest,
    load_float,
    load_floats,
    load_int32,
    maximum,
    multiply,
    multiply_add,
    ramp,
    store_float,
    store_floats,
    store_int64,
    subtract,
    total,
)
from pagefleet_kernels.cpu_tiles import (
    TILE,
    Block,
    load_row,
    pack,
    packed_scores,
    scores,
    store_row,
    weigh,
)

FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}

_QUERIES = 48
"""Queries of one task, as near as whole tokens allow."""

_PACKED_FROM = 12
"""With this many queries, transposing the keys costs less than it saves."""


class Arguments(ctypes.Structure):
    """What `attention` hands to the compiled code; addresses and strides are in bytes."""

    _fields_ = fields(
        "query query_stride output keys values tables table_stride starts offsets rows heads "
        "group block_size tokens_per_task capacity window slopes rooms room_size partials "
        "partial_size arrivals",
        "scale softcap",
    )


class Task(NamedTuple):
    """The queries of some tokens of a row that read one key/value head, over some tiles."""

    row: int
    head: int
    token: int
    """First token, counted over the step."""
    tokens: int
    position: int
    """Of the first token, in its sequence."""
    first_tile: int
    last_tile: int


class Room(NamedTuple):
    """Addresses of one thread's scratch. A state is the weighted sums of some queries in scratch
    order, then the running maximum of each, then the running total of its weights.
    """

    queries: int
    state: int
    fresh: int
    weights: int
    offsets: int
    panel: int


@device
def _layout(block: Any, address: int, capacity: int) -> Room:
    """Cuts a thread's scratch; `capacity` is in queries."""
    state = address + capacity * block.row_bytes
    fresh = state + capacity * (block.row_bytes + 64)
    weights = fresh + block.queries * (block.row_bytes + 64)
    offsets = weights + block.queries * TILE * 4
    return Room(address, state, fresh, weights, offsets, offsets + TILE * 8)


@device
def _with_state(room: Room, state: int) -> Room:
    return Room(room.queries, state, room.fresh, room.weights, room.offsets, room.panel)


def _room_size(block: Block, capacity: int) -> int:
    """Bytes that `_layout` cuts, in whole pages."""
    rows = 2 * capacity + block.queries + TILE
    extra = (capacity + block.queries) * 64 + block.queries * TILE * 4 + TILE * 8
    return -(-(rows * block.row_bytes + extra) // 4096) * 4096


@device
def _visible(arguments: Any, task: Task, tile: int, query: int) -> tuple[int, int]:
    """The keys of a tile that a query sees; queries past the last one are its twins."""
    position = task.position + min(query // arguments.group, task.tokens - 1)
    end = min(max(position + 1 - tile * TILE, 0), TILE)
    if arguments.window == 0:
        return 0, end
    return min(max(position + 1 - arguments.window - tile * TILE, 0), TILE), end


@device
def _find_keys(block: Any, arguments: Any, task: Task, tile: int, offsets: int) -> int:
    """Where the tile's keys lie, through the block table; returns how many there are."""
    count = min(task.position + task.tokens - tile * TILE, TILE)
    entry = arguments.tables + task.row * arguments.table_stride
    index, slot = divmod(tile * TILE, arguments.block_size)
    place = 0
    for key in range(-(-count // 16) * 16):
        if key < count:
            if key == 0 or slot == arguments.block_size:
                if key:
                    index, slot = index + 1, 0
                physical = load_int32(entry + index * 4)
                place = (physical * arguments.heads + task.head) * arguments.block_size
                place = (place + slot) * block.head_bytes
            store_int64(offsets + key * 8, place)
            slot += 1
            place += block.head_bytes
        else:
            store_int64(offsets + key * 8, place - block.head_bytes)
    return count


@device
def _soften(arguments: Any, row: int, begin: int, end: int, slope: float, distance: int) -> None:
    """Soft cap, then ALiBi, on a row of scores; `distance`: position of key 0 minus the query's."""
    cap = broadcast(arguments.softcap)
    twice = broadcast(2.0 / arguments.softcap if arguments.softcap else 0.0)
    one, two = broadcast(1.0), broadcast(2.0)
    for key in range(begin // 16 * 16, end, 16):
        score = load_floats(row + key * 4)
        if arguments.softcap:
            power = exp(multiply(score, twice))
            score = multiply(cap, subtract(one, divide(two, add(power, one))))
        if arguments.slopes:
            score = multiply_add(broadcast(slope), ramp(distance + key), score)
        store_floats(row + key * 4, score)


@device
def _softmax(row: int, begin: int, end: int) -> tuple[float, float]:
    """Scores `begin` .. `end` - 1 become weights, others 0; returns the maximum and the sum."""
    bottom = broadcast(-math.inf)
    top = bottom
    for key in range(begin // 16 * 16, end, 16):
        score = keep(load_floats(row + key * 4), begin - key, end - key, -math.inf)
        store_floats(row + key * 4, score)
        top = maximum(top, score)
    peak = largest(top)
    level = broadcast(peak)
    weights = broadcast(0.0)
    for key in range(begin // 16 * 16, end, 16):
        weight = exp(subtract(load_floats(row + key * 4), level))
        store_floats(row + key * 4, weight)
        weights = add(weights, weight)
    return peak, total(weights)


@device
def _merge(row_bytes: int, state: int, state_marks: int, fresh: int, fresh_marks: int) -> None:
    """Adds one tile's sums to a query's state. Marks: address of (maximum, total)."""
    fresh_top, fresh_total = load_float(fresh_marks), load_float(fresh_marks + 4)
    state_top, state_total = load_float(state_marks), load_float(state_marks + 4)
    if state_total == 0:
        for place in range(0, row_bytes, 64):
            store_floats(state + place, load_floats(fresh + place))
        store_float(state_marks, fresh_top)
        store_float(state_marks + 4, fresh_total)
        return
    top = max(state_top, fresh_top)
    old = exp(broadcast(state_top - top))
    new = exp(broadcast(fresh_top - top))
    for place in range(0, row_bytes, 64):
        part = multiply(new, load_floats(fresh + place))
        store_floats(state + place, multiply_add(old, load_floats(state + place), part))
    both = multiply_add(old, broadcast(state_total), multiply(new, broadcast(fresh_total)))
    store_float(state_marks, top)
    store_float(state_marks + 4, first(both))


@device
def _weigh_block(
    block: Any, single: Any, arguments: Any, task: Task, room: Room, tile: int, query: int
) -> None:
    """Sums the values of one tile for a block of queries: together where all of them see a key, one
    by one at the ends, so that no query ever reads a value that it must not see.
    """
    last = query + block.queries - 1
    begin, end = _visible(arguments, task, tile, last)[0], _visible(arguments, task, tile, query)[1]
    if begin >= end:
        begin = end = TILE
    for index in range(block.queries):
        low, high = _visible(arguments, task, tile, query + index)
        row, sums = room.weights + index * TILE * 4, room.fresh + index * block.row_bytes
        for place in range(0, block.row_bytes, 64):
            store_floats(sums + place, broadcast(0.0))
        if low < min(begin, high):
            weigh(single, row, room.offsets, arguments.values, sums, low, min(begin, high))
    if begin < end:
        weigh(block, room.weights, room.offsets, arguments.values, room.fresh, begin, end)
    for index in range(block.queries):
        high = _visible(arguments, task, tile, query + index)[1]
        row, sums = room.weights + index * TILE * 4, room.fresh + index * block.row_bytes
        if end < high:
            weigh(single, row, room.offsets, arguments.values, sums, end, high)


@device
def _attend_block(
    block: Any,
    single: Any,
    arguments: Any,
    task: Task,
    room: Room,
    tile: int,
    query: int,
    packed: bool,
) -> None:
    """One tile for one block of queries, merged into their states."""
    begin = _visible(arguments, task, tile, query)[0]
    end = _visible(arguments, task, tile, query + block.queries - 1)[1]
    if begin >= end:
        return
    queries = room.queries + query * block.row_bytes
    for key in range(begin // 16 * 16, end, 16):
        output = room.weights + key * 4
        if packed:
            packed_scores(block, queries, room.panel + key * block.row_bytes, output)
        else:
            scores(block, queries, room.offsets + key * 8, arguments.keys, output)
    marks = room.fresh + block.queries * block.row_bytes
    for index in range(block.queries):
        low, high = _visible(arguments, task, tile, query + index)
        if low < high:
            row = room.weights + index * TILE * 4
            if arguments.softcap or arguments.slopes:
                head = task.head * arguments.group + (query + index) % arguments.group
                slope = load_float(arguments.slopes + head * 4) if arguments.slopes else 0.0
                token = min((query + index) // arguments.group, task.tokens - 1)
                distance = tile * TILE - task.position - token
                _soften(arguments, row, low, high, slope, distance)
            peak, weight = _softmax(row, low, high)
            store_float(marks + index * 8, peak)
            store_float(marks + index * 8 + 4, weight)
    _weigh_block(block, single, arguments, task, room, tile, query)
    for index in range(block.queries):
        low, high = _visible(arguments, task, tile, query + index)
        if low < high:
            state = room.state + (query + index) * block.row_bytes
            state_marks = room.state + arguments.capacity * block.row_bytes + (query + index) * 8
            fresh = room.fresh + index * block.row_bytes
            _merge(block.row_bytes, state, state_marks, fresh, marks + index * 8)


@device
def _attend(block: Any, single: Any, arguments: Any, task: Task, room: Room, packed: bool) -> None:
    """All tiles of a task, from an empty state."""
    group = arguments.group
    queries = task.tokens * group
    for query in range(-(-queries // block.queries) * block.queries):
        source = arguments.query + (task.token + query // group) * arguments.query_stride
        source += (task.head * group + query % group) * block.head_bytes
        target = room.queries + query * block.row_bytes
        if query < queries:
            load_row(single, source, target, arguments.scale)
        else:
            for place in range(0, block.row_bytes, 64):
                store_floats(target + place, broadcast(0.0))
        store_float(room.state + arguments.capacity * block.row_bytes + query * 8 + 4, 0.0)
    for tile in range(task.first_tile, task.last_tile):
        keys = _find_keys(block, arguments, task, tile, room.offsets)
        if packed:
            for key in range(0, keys, 16):
                panel = room.panel + key * block.row_bytes
                pack(single, room.offsets + key * 8, arguments.keys, panel)
        for query in range(0, queries, block.queries):
            _attend_block(block, single, arguments, task, room, tile, query, packed)


@device
def _finish(single: Any, arguments: Any, task: Task, state: int) -> None:
    """Divides the sums of a task's queries by their totals, into the output."""
    group = arguments.group
    for query in range(task.tokens * group):
        token, head = task.token + query // group, task.head * group + query % group
        target = (token * arguments.heads * group + head) * single.head_bytes
        weight = load_float(state + arguments.capacity * single.row_bytes + query * 8 + 4)
        row = state + query * single.row_bytes
        store_row(single, row, arguments.output + target, weight)


@device
def _gather(single: Any, arguments: Any, task: Task, room: Room, partial: int, splits: int) -> None:
    """Counts one split of a decode row as done; whoever finishes the last merges them in order."""
    arrival = arguments.arrivals + (task.row * arguments.heads + task.head) * 8
    if fetch_add(arrival, 1) + 1 < splits:
        return
    store_int64(arrival, 0)
    marks = arguments.capacity * single.row_bytes
    for query in range(arguments.group):
        store_float(room.state + marks + query * 8 + 4, 0.0)
        row, mark = query * single.row_bytes, marks + query * 8
        for split in range(splits):
            part = partial + split * arguments.heads * arguments.partial_size
            _merge(single.row_bytes, room.state + row, room.state + mark, part + row, part + mark)
    _finish(single, arguments, task, room.state)


@device
def _task(arguments: Any, row: int, head: int, token: int, tokens: int, skipped: int) -> Task:
    """The task of a row's `tokens` tokens from `token` on, `skipped` after the row's first."""
    position = load_int32(arguments.starts + row * 4) + skipped
    window = arguments.window
    first_tile = max(position + 1 - window, 0) // TILE if window else 0
    return Task(row, head, token, tokens, position, first_tile, -(-(position + tokens) // TILE))


@device
def _run(narrow: Any, wide: Any, single: Any, arguments: Any) -> None:
    """Takes tasks until there are none left. Their order is known from the rows alone: row by row,
    the last tokens (they see most) first; a decode row's tiles are tasks of their own.
    """
    own = arguments.rooms + thread_number(arguments) * arguments.room_size
    room = _layout(wide, own, arguments.capacity)
    number, begin, partial = next_task(arguments), 0, arguments.partials
    heads, step = arguments.heads, arguments.tokens_per_task
    for row in range(arguments.rows):
        token = load_int32(arguments.offsets + row * 4)
        tokens = load_int32(arguments.offsets + row * 4 + 4) - token
        whole = _task(arguments, row, 0, token, tokens, 0)
        splits = whole.last_tile - whole.first_tile if tokens == 1 else 1
        parts = splits if splits > 1 else -(-tokens // step)
        while number < begin + parts * heads:
            part, head = divmod(number - begin, heads)
            if splits > 1:
                tile, states = whole.first_tile + part, partial + head * arguments.partial_size
                task = Task(row, head, token, 1, whole.position, tile, tile + 1)
                state = states + part * heads * arguments.partial_size
                _attend(narrow, single, arguments, task, _with_state(room, state), False)
                _gather(single, arguments, task, room, states, splits)
            else:
                skipped = (parts - 1 - part) * step
                count = min(tokens - skipped, step)
                task = _task(arguments, row, head, token + skipped, count, skipped)
                if count * arguments.group < _PACKED_FROM:
                    _attend(narrow, single, arguments, task, room, False)
                else:
                    _attend(wide, single, arguments, task, room, True)
                _finish(single, arguments, task, room.state)
            number = next_task(arguments)
        begin += parts * heads
        if splits > 1:
            partial += parts * heads * arguments.partial_size


@functools.cache
def _kernel(form: Format, head_size: int, group: int) -> tuple[Kernel, Block]:
    """The compiled kernel for a model's shape, and its widest block."""
    narrow = Block(form, head_size, -(-group // -(-group // 4)))
    wide, single = Block(form, head_size, 6), Block(form, head_size, 1)

    def attention_kernel(pointer: Any) -> None:
        _run(narrow, wide, single, carray(pointer, 1)[0])

    return Kernel(attention_kernel, Arguments), wide


_scratch = Scratch()


def _supported(query: Tensor, key_cache: Tensor, value_cache: Tensor, tables: Tensor) -> bool:
    return (
        query.dtype in FORMATS
        and query.dtype == key_cache.dtype == value_cache.dtype
        and query.shape[2] % 8 == 0
        and query.stride()[1:] == (query.shape[2], 1)
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and tables.stride(1) == 1
    )


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
) -> Tensor:
    """`reference.attention`, compiled. Types other than float32 and bfloat16, and head sizes that
    are no multiple of 8, go to the reference.
    """
    if not _supported(query, key_cache, value_cache, tables):
        return reference.attention(
            query, key_cache, value_cache, tables, starts, offsets,
            scale=scale, window=window, softcap=softcap, slopes=slopes,
        )  # fmt: skip
    _, heads, block_size, head_size = key_cache.shape
    rows, width = tables.shape
    group = query.shape[1] // heads
    kernel, wide = _kernel(FORMATS[query.dtype], head_size, group)
    threads = torch.get_num_threads()
    tokens_per_task = max(_QUERIES // group, 1)
    capacity = tokens_per_task * group + wide.queries
    room_size = _room_size(wide, capacity)
    partial_size = capacity * (wide.row_bytes + 64)
    splits = -(-width * block_size // TILE)
    output = torch.empty(query.shape, dtype=query.dtype)
    arguments = Arguments(
        query=query.data_ptr(),
        query_stride=query.stride(0) * query.element_size(),
        output=output.data_ptr(),
        keys=key_cache.data_ptr(),
        values=value_cache.data_ptr(),
        tables=tables.data_ptr(),
        table_stride=tables.stride(0) * 4,
        starts=starts.data_ptr(),
        offsets=offsets.data_ptr(),
        rows=rows,
        heads=heads,
        group=group,
        block_size=block_size,
        tokens_per_task=tokens_per_task,
        capacity=capacity,
        window=window,
        slopes=0 if slopes is None else slopes.data_ptr(),
        rooms=_scratch.address("rooms", room_size * threads),
        room_size=room_size,
        partials=_scratch.address("partials", rows * heads * splits * partial_size),
        partial_size=partial_size,
        arrivals=_scratch.address("arrivals", rows * heads * 8),
        scale=scale,
        softcap=softcap,
    )
    kernel(arguments, threads)
    return output
