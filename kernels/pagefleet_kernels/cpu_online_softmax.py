"""One tile of attention for one block of queries: scores, online softmax, weighted values.

Within a tile the weights are taken against the tile's own maximum, and its sums begin from nothing;
then they are merged into the query's state by one formula (Milakov and Gimelshein, 2018), so that
a state may be built tile by tile or out of tiles that several threads computed.
"""

import math
from typing import Any, NamedTuple

from pagefleet_kernels.cpu_ir import (
    device,
)
from pagefleet_kernels.cpu_rows import PANEL, Block
from pagefleet_kernels.cpu_simd import (
    add,
    broadcast,
    divide,
    exp,
    first,
    keep,
    largest,
    load_float,
    load_floats,
    load_int64,
    maximum,
    multiply,
    multiply_add,
    ramp,
    store_float,
    store_floats,
    subtract,
    total,
)
from pagefleet_kernels.cpu_tiles import (
    TILE,
    scores,
    weigh,
)


class Task(NamedTuple):
    """Some tokens of a row, over some tiles of its context."""

    row: int
    token: int
    """First token, counted over the step."""
    tokens: int
    position: int
    """Of the first token, in its sequence."""
    first_tile: int
    last_tile: int


class Head(NamedTuple):
    """A key/value head: its number, and the addresses that offsets of panels count from."""

    number: int
    keys: int
    values: int
    ahead: int
    """With `ahead_panels`, where the keys lie that are needed next, to be sent for in time."""
    ahead_panels: int


class Room(NamedTuple):
    """Addresses of one thread's scratch. A state is a query's weighted sums in scratch order, then
    the maximum of its scores and the total of its weights.
    """

    queries: int
    states: int
    fresh: int
    """The states of one block of queries in one tile."""
    weights: int
    panels: int
    """Where the panels of a tile lie: int64 offsets in bytes."""
    ahead_panels: int


@device
def layout(block: Any, address: int, capacity: int) -> Room:
    """Cuts a thread's scratch for `capacity` queries."""
    states = address + capacity * block.row_bytes
    fresh = states + capacity * block.state_bytes
    weights = fresh + block.queries * block.state_bytes
    panels = weights + block.queries * TILE * 4
    return Room(address, states, fresh, weights, panels, panels + TILE // PANEL * 8)


@device
def with_states(room: Room, states: int) -> Room:
    """The same scratch with the states elsewhere."""
    return Room(room.queries, states, room.fresh, room.weights, room.panels, room.ahead_panels)


def room_size(block: Block, capacity: int) -> int:
    """Bytes that `layout` cuts, in whole pages."""
    states = (capacity + block.queries) * block.state_bytes
    others = capacity * block.row_bytes + block.queries * TILE * 4 + 2 * TILE // PANEL * 8
    return -(-(states + others) // 4096) * 4096


@device
def _visible(arguments: Any, task: Task, tile: int, query: int) -> tuple[int, int]:
    """The keys of a tile that a query sees; queries past the last one are its twins."""
    position = task.position + min(query // arguments.group, task.tokens - 1)
    end = min(max(position + 1 - tile * TILE, 0), TILE)
    if arguments.window == 0:
        return 0, end
    return min(max(position + 1 - arguments.window - tile * TILE, 0), TILE), end


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
def merge(block: Any, state: int, fresh: int) -> None:
    """Adds one tile's sums to a query's state; a state without weight takes them as they are."""
    top, weight = load_float(state + block.row_bytes), load_float(state + block.row_bytes + 4)
    if weight == 0:
        for place in range(0, block.state_bytes, 64):
            store_floats(state + place, load_floats(fresh + place))
        return
    fresh_top = load_float(fresh + block.row_bytes)
    fresh_weight = load_float(fresh + block.row_bytes + 4)
    peak = max(top, fresh_top)
    old, new = exp(broadcast(top - peak)), exp(broadcast(fresh_top - peak))
    for place in range(0, block.row_bytes, 64):
        part = multiply(new, load_floats(fresh + place))
        store_floats(state + place, multiply_add(old, load_floats(state + place), part))
    both = multiply_add(old, broadcast(weight), multiply(new, broadcast(fresh_weight)))
    store_float(state + block.row_bytes, peak)
    store_float(state + block.row_bytes + 4, first(both))


@device
def _weigh(
    block: Any, head: Head, room: Room, weights: int, sums: int, begin: int, end: int
) -> None:
    weigh(block, weights, room.panels, head.values, sums, begin, end, head.ahead_panels, head.ahead)


@device
def _weigh_block(
    block: Any, arguments: Any, task: Task, head: Head, room: Room, tile: int, query: int
) -> None:
    """Sums the values of one tile for a block of queries: together where all of them see a key, one
    by one at the ends, so that no query ever reads a value that it must not see.
    """
    single = block.single
    begin = _visible(arguments, task, tile, query + block.queries - 1)[0]
    end = _visible(arguments, task, tile, query)[1]
    if begin >= end:
        begin = end = TILE
    for index in range(block.queries):
        low, high = _visible(arguments, task, tile, query + index)
        row, sums = room.weights + index * TILE * 4, room.fresh + index * block.state_bytes
        for place in range(0, block.row_bytes, 64):
            store_floats(sums + place, broadcast(0.0))
        if low < min(begin, high):
            _weigh(single, head, room, row, sums, low, min(begin, high))
    _weigh(block, head, room, room.weights, room.fresh, begin, end)
    for index in range(block.queries):
        high = _visible(arguments, task, tile, query + index)[1]
        row, sums = room.weights + index * TILE * 4, room.fresh + index * block.state_bytes
        if end < high:
            _weigh(single, head, room, row, sums, end, high)


@device
def _block_scores(
    block: Any, head: Head, room: Room, query: int, begin: int, end: int, scale: float
) -> None:
    """Scores of a block of queries with the keys `begin` .. `end` - 1, in whole panels. If they are
    read once, their values are sent for.
    """
    queries = room.queries + query * block.row_bytes
    for panel in range(begin // PANEL, -(-end // PANEL)):
        place = load_int64(room.panels + panel * 8)
        output = room.weights + panel * PANEL * 4
        scores(block, queries, head.keys + place, head.values + place, output, scale)


@device
def attend_block(
    block: Any,
    arguments: Any,
    task: Task,
    head: Head,
    room: Room,
    tile: int,
    query: int,
) -> None:
    """One tile for the block of queries from `query` on, merged into their states."""
    begin = _visible(arguments, task, tile, query)[0]
    end = _visible(arguments, task, tile, query + block.queries - 1)[1]
    if begin >= end:
        return
    _block_scores(block, head, room, query, begin, end, arguments.scale)
    for index in range(block.queries):
        low, high = _visible(arguments, task, tile, query + index)
        if low < high:
            row = room.weights + index * TILE * 4
            if arguments.softcap or arguments.slopes:
                number = head.number * arguments.group + (query + index) % arguments.group
                slope = load_float(arguments.slopes + number * 4) if arguments.slopes else 0.0
                token = min((query + index) // arguments.group, task.tokens - 1)
                _soften(arguments, row, low, high, slope, tile * TILE - task.position - token)
            peak, weight = _softmax(row, low, high)
            marks = room.fresh + index * block.state_bytes + block.row_bytes
            store_float(marks, peak)
            store_float(marks + 4, weight)
    _weigh_block(block, arguments, task, head, room, tile, query)
    for index in range(block.queries):
        low, high = _visible(arguments, task, tile, query + index)
        if low < high:
            state = room.states + (query + index) * block.state_bytes
            merge(block, state, room.fresh + index * block.state_bytes)
