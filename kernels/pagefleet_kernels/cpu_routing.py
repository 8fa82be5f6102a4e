"""Who goes to which expert, on the CPU: `reference.route`, and then a counting sort.

Each row is routed by itself. Then the rows of all experts are sorted into *slots*, expert by expert
and in the order of the rows; slots of one expert make *groups*, whose entries say what is to be
multiplied with what.
"""

import ctypes
import functools
import math
from typing import Any

from numba import carray

from pagefleet_kernels.cpu_gemm import TILE_ROWS
from pagefleet_kernels.cpu_ir import LANES, Format, device
from pagefleet_kernels.cpu_launch import Kernel, fields, next_task, next_tasks
from pagefleet_kernels.cpu_simd import (
    add,
    broadcast,
    divide,
    exp,
    first,
    keep,
    load_float,
    load_floats,
    load_int64,
    load_numbers,
    negative,
    store_float,
    store_floats,
    store_int64,
    subtract,
    total,
)
from pagefleet_kernels.experts import SMALLEST_WEIGHT

GROUP_ROWS = 8 * TILE_ROWS
"""Rows of one expert that a task takes through a panel: they stay in the second-level cache."""

GROUP_BYTES = 3 * 8
"""Of a group's entry: int64 expert, its first slot, and the first behind it."""

_FLOAT32 = Format.FLOAT32
_INFINITY = float("inf")


class RouteArguments(ctypes.Structure):
    """What rows are routed with; strides are in bytes. `choices` is the number of experts to choose
    from, behind whose scores lies the one that weighs the shared ones. `worths` has room for as
    many float32 as the scores, and behind those of a row for one of each group; `correction` is
    that of float32 for every expert, in whole vectors, or 0. int64 experts are written to `taken`
    and float32 weights to `factors`, `chosen + shared` of each row.
    """

    _fields_ = fields(
        "rows scores stride choices chosen shared weighted sigmoid renormalized groups open_groups "
        "correction worths worths_stride taken factors",
        "factor",
    )


class SortArguments(ctypes.Structure):
    """What rows are sorted with: `each` is how many experts a row takes of `experts`; `ends` has
    room for an int64 of each. Of each slot `numbers` gets the int64 row and `weights` the float32
    weight; `groups` gets the number of groups, then their entries.
    """

    _fields_ = fields("rows taken factors each experts ends numbers weights groups")


@device
def _worth(worths: int, number: int) -> Any:
    """How good an expert is, or a group; one that is no number is the worst."""
    worth = load_float(worths + number * 4)
    return -_INFINITY if math.isnan(worth) else worth


@device
def _next_best(worths: int, count: int, worth: Any, number: int) -> int:
    """The best behind the one that has this number and worth; equals follow in order."""
    best, found = -_INFINITY, -1
    for other in range(count):
        value = _worth(worths, other)
        behind = value < worth or (value == worth and other > number)
        if behind and (found < 0 or value > best):
            best, found = value, other
    return found


@device
def _sigmoid(scores: Any) -> Any:
    one = broadcast(1.0)
    return divide(one, add(one, exp(negative(scores))))


@device
def _write_worths(arguments: Any, scores: int, worths: int) -> None:
    for begin in range(0, arguments.choices, LANES):
        worth = load_floats(scores + begin * 4)
        if arguments.sigmoid:
            worth = _sigmoid(worth)
        if arguments.correction:
            worth = add(worth, load_floats(arguments.correction + begin * 4))
        store_floats(worths + begin * 4, worth)


@device
def _close_groups(arguments: Any, worths: int) -> None:
    """Makes the experts of all but the best groups the worst ones."""
    groups, size = worths + arguments.stride, arguments.choices // arguments.groups
    for group in range(arguments.groups):
        own = worths + group * size * 4
        best = _next_best(own, size, _INFINITY, -1)
        worth = _worth(own, best)
        if arguments.sigmoid:
            worth += _worth(own, _next_best(own, size, worth, best))
        store_float(groups + group * 4, worth)
    worth, number = _INFINITY, -1
    for _ in range(arguments.open_groups):
        number = _next_best(groups, arguments.groups, worth, number)
        worth = _worth(groups, number)
    for group in range(arguments.groups):
        other = _worth(groups, group)
        if other < worth or (other == worth and group > number):
            for expert in range(group * size, (group + 1) * size):
                store_float(worths + expert * 4, -_INFINITY)


@device
def _sum_of_powers(scores: int, choices: int, largest: Any) -> Any:
    """Of e ** (score - largest) over all experts."""
    sums = broadcast(0.0)
    for begin in range(0, choices, LANES):
        scaled = subtract(load_numbers(_FLOAT32, scores + begin * 4), broadcast(largest))
        sums = add(sums, keep(exp(scaled), 0, choices - begin, 0.0))
    return total(sums)


@device
def _power(exponent: Any) -> Any:
    return first(exp(broadcast(exponent)))


@device
def _route_row(arguments: Any, row: int) -> None:
    scores = arguments.scores + row * arguments.stride
    worths = arguments.worths + row * arguments.worths_stride
    begin = row * (arguments.chosen + arguments.shared)
    taken, factors = arguments.taken + begin * 8, arguments.factors + begin * 4
    _write_worths(arguments, scores, worths)
    if arguments.groups > 1:
        _close_groups(arguments, worths)
    worth, number = _INFINITY, -1
    largest, chosen = worth, 0.0
    for place in range(arguments.chosen):
        number = _next_best(worths, arguments.choices, worth, number)
        worth = _worth(worths, number)
        if arguments.sigmoid:
            weight = first(_sigmoid(broadcast(load_float(scores + number * 4))))
        else:
            if place == 0:
                largest = worth
            weight = _power(worth - largest)
        chosen += weight
        store_int64(taken + place * 8, number)
        store_float(factors + place * 4, weight)
    divisor = chosen
    if arguments.sigmoid:
        divisor = chosen + SMALLEST_WEIGHT if arguments.renormalized else 1.0
    elif not arguments.renormalized:
        divisor = _sum_of_powers(scores, arguments.choices, largest)
    for place in range(arguments.chosen):
        weight = load_float(factors + place * 4) / divisor * arguments.factor
        store_float(factors + place * 4, weight)
    counting = 1.0
    if arguments.weighted:
        counting = 1.0 / (1.0 + _power(-load_float(scores + arguments.choices * 4)))
    for index in range(arguments.shared):
        place = arguments.chosen + index
        store_int64(taken + place * 8, arguments.choices + index)
        store_float(factors + place * 4, counting)


@device
def run_route(arguments: Any) -> None:
    """Takes rows until there are none left."""
    row, last = next_tasks(arguments, arguments.rows)
    while row < last:
        _route_row(arguments, row)
        row += 1
        if row == last:
            row, last = next_tasks(arguments, arguments.rows)


@device
def _write_groups(arguments: Any) -> None:
    """The groups, from the slots of each expert that precede its `ends`."""
    count, begin = 0, 0
    for expert in range(arguments.experts):
        end = load_int64(arguments.ends + expert * 8)
        parts = -(-(end - begin) // GROUP_ROWS)
        for part in range(parts):
            entry = arguments.groups + 8 + count * GROUP_BYTES
            store_int64(entry, expert)
            store_int64(entry + 8, begin + (end - begin) * part // parts)
            store_int64(entry + 16, begin + (end - begin) * (part + 1) // parts)
            count += 1
        begin = end
    store_int64(arguments.groups, count)


@device
def run_sort(arguments: Any) -> None:
    """Whichever thread comes first does it all: a counting sort."""
    if next_task(arguments) > 0:
        return
    entries, ends = arguments.rows * arguments.each, arguments.ends
    for expert in range(arguments.experts):
        store_int64(ends + expert * 8, 0)
    for entry in range(entries):
        place = ends + load_int64(arguments.taken + entry * 8) * 8
        store_int64(place, load_int64(place) + 1)
    for expert in range(1, arguments.experts):
        place = ends + expert * 8
        store_int64(place, load_int64(place - 8) + load_int64(place))
    _write_groups(arguments)
    for entry in range(entries - 1, -1, -1):
        place = ends + load_int64(arguments.taken + entry * 8) * 8
        slot = load_int64(place) - 1
        store_int64(place, slot)
        store_int64(arguments.numbers + slot * 8, entry // arguments.each)
        store_float(arguments.weights + slot * 4, load_float(arguments.factors + entry * 4))


@functools.cache
def route_kernel() -> Kernel:
    """The compiled routing."""

    def routing(pointer: Any) -> None:
        run_route(carray(pointer, 1)[0])

    return Kernel(routing, RouteArguments)


@functools.cache
def sort_kernel() -> Kernel:
    """The compiled sorting."""

    def sorting(pointer: Any) -> None:
        run_sort(carray(pointer, 1)[0])

    return Kernel(sorting, SortArguments)
