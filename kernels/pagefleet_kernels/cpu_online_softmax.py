"""One tile of attention for one block of queries: scores, online softmax, weighted values.

Within a tile the weights are taken against the tile's own maximum, and its sums begin from nothing;
then they are merged into the query's state by one formula (Milakov and Gimelshein, 2018), so that
a state may be built tile by tile or out of tiles that several threads computed.
"""

import math
from typing import Any, NamedTuple

from pagefleet_kernels.cpu_ir import (
    Format,
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
    rounded,
    store_float,
    store_floats,
    store_numbers,
    subtract,
    total,
)
from pagefleet_kernels.cpu_tasks import Task
from pagefleet_kernels.cpu_tiles import (
    TILE,
    scores,
    weigh,
)

_BFLOAT16 = Format.BFLOAT16


class Head(NamedTuple):
    """A key/value head: its number, and the addresses that offsets of panels count from."""

    number: int
    keys: int
    values: int
    scale: float
    """That products with its keys are multiplied by."""
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
    """The states of one block of queries in one tile, until they are merged."""
    weights: int
    panels: int
    """Where the panels of a tile lie: int64 offsets in bytes."""
    ahead_panels: int


@device
def layout(block: Any, address: int, capacity: int) -> Room:
    """Cuts a thread's scratch for `capacity` queries."""
    states = address + capacity * block.query_bytes
    fresh = states + capacity * block.state_bytes
    weights = fresh + block.queries * block.state_bytes
    panels = weights + capacity * TILE * 4
    return Room(address, states, fresh, weights, panels, panels + TILE // PANEL * 8)


def room_size(block: Block, capacity: int) -> int:
    """Bytes that `layout` cuts, in whole pages."""
    each = block.query_bytes + block.state_bytes + TILE * 4
    size = capacity * each + block.queries * block.state_bytes + 2 * TILE // PANEL * 8
    return -(-size // 4096) * 4096


@device
def visible(arguments: Any, task: Task, tile: int, query: int) -> tuple[int, int]:
    """The keys of a tile that a query sees; queries past the last one are its twins."""
    position = task.position
    if task.tokens > 1:
        position += min(query // arguments.group, task.tokens - 1)
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
def _seen(row: int, key: int, begin: int, end: int) -> Any:
    """Sixteen scores from number `key` on, of which those outside of `begin` .. `end` - 1 are
    hidden.
    """
    score = load_floats(row + key * 4)
    if begin <= key and key + 16 <= end:
        return score
    return keep(score, begin - key, end - key, -math.inf)


@device
def _softmax(block: Any, row: int, begin: int, end: int) -> tuple[float, float]:
    """Scores `begin` .. `end` - 1 become weights, others 0; returns the maximum and the sum.
    Weights of 16 bits fill the first half of the row.
    """
    top = broadcast(-math.inf)
    for key in range(begin // 16 * 16, end, 16):
        top = maximum(_seen(row, key, begin, end), top)
    peak = largest(top)
    level = broadcast(peak)
    weights = broadcast(0.0)
    for key in range(begin // 16 * 16, end, 16):
        weight = exp(subtract(_seen(row, key, begin, end), level))
        if block.paired:
            store_numbers(_BFLOAT16, row + key * 2, weight)
            weight = rounded(_BFLOAT16, weight)
        else:
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
    block: Any,
    arguments: Any,
    task: Task,
    head: Head,
    room: Room,
    tile: int,
    query: int,
    weights: int,
    states: int,
) -> None:
    """Sums the values of one tile for a block of queries: together where all of them see a key, one
    by one at the ends, so that no query ever reads a value that it must not see.
    """
    single = block.single
    begin = visible(arguments, task, tile, query + block.queries - 1)[0]
    end = visible(arguments, task, tile, query)[1]
    if block.paired and task.tokens > 1:  # both keys of a pair are weighted by the same call
        begin, end = (begin + 1) // 2 * 2, end // 2 * 2
    if begin >= end:
        begin = end = TILE
    for index in range(block.queries):
        low, high = visible(arguments, task, tile, query + index)
        row, sums = weights + index * TILE * 4, states + index * block.state_bytes
        for place in range(0, block.row_bytes, 64):
            store_floats(sums + place, broadcast(0.0))
        if low < min(begin, high):
            _weigh(single, head, room, row, sums, low, min(begin, high))
    _weigh(block, head, room, weights, states, begin, end)
    for index in range(block.queries):
        high = visible(arguments, task, tile, query + index)[1]
        row, sums = weights + index * TILE * 4, states + index * block.state_bytes
        if end < high:
            _weigh(single, head, room, row, sums, end, high)


@device
def score(
    block: Any, arguments: Any, head: Head, room: Room, panel: int, queries: int, weights: int
) -> None:
    """Scores of a block of `queries` with a panel of the tile, into their rows of `weights`. If
    keys and values are read once, the panel's values are sent for.
    """
    place = load_int64(room.panels + panel * 8)
    output = weights + panel * PANEL * 4
    scores(block, queries, head.keys + place, head.values + place, output, head.scale)


@device
def attend_block(
    block: Any,
    arguments: Any,
    task: Task,
    head: Head,
    room: Room,
    tile: int,
    query: int,
    weights: int,
    states: int,
) -> None:
    """The `states`, in one tile, of the block of queries from `query` on, whose scores are in
    `weights`; those of queries that see nothing of it are undefined.
    """
    for index in range(block.queries):
        low, high = visible(arguments, task, tile, query + index)
        if low < high:
            row = weights + index * TILE * 4
            if arguments.softcap or arguments.slopes:
                number = head.number * arguments.group + (query + index) % arguments.group
                slope = load_float(arguments.slopes + number * 4) if arguments.slopes else 0.0
                token = min((query + index) // arguments.group, task.tokens - 1)
                _soften(arguments, row, low, high, slope, tile * TILE - task.position - token)
            peak, weight = _softmax(block, row, low, high)
            marks = states + index * block.state_bytes + block.row_bytes
            store_float(marks, peak)
            store_float(marks + 4, weight)
    _weigh_block(block, arguments, task, head, room, tile, query, weights, states)
