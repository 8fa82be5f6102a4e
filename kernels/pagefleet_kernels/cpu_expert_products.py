"""The loops over the experts of a mixture, compiled: stages *gates* and *sums* of `cpu_experts`."""

import ctypes
import functools
from typing import Any

from numba import carray

from pagefleet_kernels.cpu_gemm import (
    PANEL,
    PANEL_VECTORS,
    TILE_ROWS,
    scattered_product,
    sums_of_a_tile,
)
from pagefleet_kernels.cpu_grouped import Weights
from pagefleet_kernels.cpu_ir import LANES, Format, device
from pagefleet_kernels.cpu_launch import Kernel, fields, next_tasks
from pagefleet_kernels.cpu_linear import bias_of, outputs, store, write_row
from pagefleet_kernels.cpu_routing import GROUP_BYTES
from pagefleet_kernels.cpu_simd import (
    broadcast,
    load_float,
    load_floats,
    load_int64,
    multiply_add,
    store_floats,
)


class GatesArguments(ctypes.Structure):
    """What the first matrices of experts are multiplied with: beside what sorting has written, the
    fields of `cpu_linear.LinearArguments`, with `panel_count` that of one expert.
    """

    _fields_ = fields(
        "values stride panels panel_bytes panel_count steps bias epilogue "
        "output output_stride columns numbers groups"
    )


class SumsArguments(ctypes.Structure):
    """What the second matrices of experts are multiplied with: `values` are those of the slots,
    `slots` is the address of int64 0, 1, ..., and `sums` that of float32 for every row and all
    panels.
    """

    _fields_ = fields(
        "rows values stride panels panel_bytes panel_count steps bias "
        "output output_stride columns slots numbers weights groups sums sums_stride"
    )


@device
def _multiply(
    form: Any,
    weights: Any,
    rows: int,
    values: int,
    stride: int,
    numbers: int,
    panel: int,
    steps: int,
    sums: int,
) -> None:
    """The one place that has the loops of the product, which take long to compile."""
    scattered_product(form, weights, rows, values, stride, numbers, panel, steps, sums)


@device
def run_gates(form: Any, weights: Any, arguments: Any) -> None:
    """Takes panels of groups until there are none left."""
    sums = sums_of_a_tile()
    values, stride, steps = arguments.values, arguments.stride, arguments.steps
    tasks = load_int64(arguments.groups) * arguments.panel_count
    task, last = next_tasks(arguments, tasks)
    while task < last:
        group, panel = divmod(task, arguments.panel_count)
        entry = arguments.groups + 8 + group * GROUP_BYTES
        place = load_int64(entry) * arguments.panel_count + panel
        begin, end = load_int64(entry + 8), load_int64(entry + 16)
        tiles = -(-(end - begin) // TILE_ROWS)
        for tile in range(tiles):
            slot = begin + (end - begin) * tile // tiles
            behind = begin + (end - begin) * (tile + 1) // tiles
            numbers = arguments.numbers + slot * 8
            address = arguments.panels + place * arguments.panel_bytes
            rows = behind - slot
            _multiply(form, weights, rows, values, stride, numbers, address, steps, sums)
            bias = bias_of(form, arguments, place)
            for row in range(slot, behind):
                output = arguments.output + row * arguments.output_stride
                write_row(form, arguments, panel, bias, sums + (row - slot) * PANEL * 4, output)
        task += 1
        if task == last:
            task, last = next_tasks(arguments, tasks)


@device
def _add_slot(form: Any, arguments: Any, panel: int, bias: int, slot: int, sums: int) -> None:
    """Adds a slot's outputs, weighted, to its row's."""
    row = load_int64(arguments.numbers + slot * 8)
    weight = broadcast(load_float(arguments.weights + slot * 4))
    target = arguments.sums + row * arguments.sums_stride + panel * PANEL * 4
    for vector in range(PANEL_VECTORS):
        place, output = vector * LANES * 4, outputs(form, bias, sums, vector)
        store_floats(target + place, multiply_add(output, weight, load_floats(target + place)))


@device
def _add_group(
    form: Any, weights: Any, arguments: Any, entry: int, task: int, last: int, sums: int
) -> None:
    """The slots of one group, for the panels `task` .. `last` - 1."""
    begin, end = load_int64(entry + 8), load_int64(entry + 16)
    values, stride, steps = arguments.values, arguments.stride, arguments.steps
    tiles = -(-(end - begin) // TILE_ROWS)
    for panel in range(task, last):
        place = load_int64(entry) * arguments.panel_count + panel
        address = arguments.panels + place * arguments.panel_bytes
        bias = bias_of(form, arguments, place)
        for tile in range(tiles):
            slot = begin + (end - begin) * tile // tiles
            behind = begin + (end - begin) * (tile + 1) // tiles
            slots, rows = arguments.slots + slot * 8, behind - slot
            _multiply(form, weights, rows, values, stride, slots, address, steps, sums)
            for each in range(slot, behind):
                _add_slot(form, arguments, panel, bias, each, sums + (each - slot) * PANEL * 4)


@device
def _write_sums(form: Any, arguments: Any, task: int, last: int) -> None:
    for row in range(arguments.rows):
        source = arguments.sums + row * arguments.sums_stride
        output = arguments.output + row * arguments.output_stride
        for begin in range(task * PANEL, last * PANEL, LANES):
            vector = load_floats(source + begin * 4)
            store(form, output + begin * form.itemsize, vector, arguments.columns - begin)


@device
def run_sums(form: Any, weights: Any, arguments: Any) -> None:
    """Takes panels until there are none left."""
    sums = sums_of_a_tile()
    task, last = next_tasks(arguments, arguments.panel_count)
    while task < last:
        for row in range(arguments.rows):
            target = arguments.sums + row * arguments.sums_stride
            for begin in range(task * PANEL, last * PANEL, LANES):
                store_floats(target + begin * 4, broadcast(0.0))
        for group in range(load_int64(arguments.groups)):
            entry = arguments.groups + 8 + group * GROUP_BYTES
            _add_group(form, weights, arguments, entry, task, last, sums)
        _write_sums(form, arguments, task, last)
        task, last = next_tasks(arguments, arguments.panel_count)


@functools.cache
def gates_kernel(form: Format, weights: Weights) -> Kernel:
    """The compiled first products for values in `form`."""

    def gates(pointer: Any) -> None:
        run_gates(form, weights, carray(pointer, 1)[0])

    return Kernel(gates, GatesArguments)


@functools.cache
def sums_kernel(form: Format, weights: Weights) -> Kernel:
    """The compiled second products for values in `form`."""

    def sums(pointer: Any) -> None:
        run_sums(form, weights, carray(pointer, 1)[0])

    return Kernel(sums, SumsArguments)
