"""Low-rank adapters on the CPU: what `lora` means, beside the packed products of `cpu_linear`.

A step's rows may belong to different adapters. Before a layer's product a stage shrinks the rows
that have one, inner = scale * (A x), rounded to the numbers' type. Then the product itself, before
anything is rounded, adds B inner to its float32 sums, panel by panel, so that activations and
quantized weights are what they are without adapters. Rows without one are passed over.

Rows are taken in runs of neighbours of one adapter; the more of these there are, the less often is
an adapter read. An output is one chain of sums whatever stands beside it (`cpu_gemm`).

The factors of the parts of a layer (queries, keys, values; gates and values) lie one below the
other in A; a vector of outputs is multiplied with the inner numbers of its own part only.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor

from pagefleet_kernels.cpu_gemm import (
    PANEL,
    PANEL_VECTORS,
    TILE_ROWS,
    narrow_product,
    sums_of_a_tile,
)
from pagefleet_kernels.cpu_ir import LANES, Format, device
from pagefleet_kernels.cpu_launch import FORMATS, Kernel, fields, next_tasks
from pagefleet_kernels.cpu_packing import arena, packed
from pagefleet_kernels.cpu_rows import prefetch
from pagefleet_kernels.cpu_simd import (
    add,
    load_floats,
    load_int32,
    load_int64,
    multiply,
    store_floats,
    store_numbers,
)
from pagefleet_kernels.lora import Factors, Loras

_WORD_BYTES = 4
"""Of a step of a row: one float32, or two bfloat16."""

_VECTOR_BYTES = LANES * 4

_ADAPTER_BYTES = 4 * 8
"""Of an adapter's entry in a layer's table: int64 panels of A (0: it changes nothing), their
address, the address of their outputs' scales, and that of the table of B."""

_OUTPUTS_BYTES = 3 * 8
"""Of the entry of one vector of outputs in the table of B: int64 address of its panel, bytes from
the first inner number to the first it needs, and steps (0: it is not changed)."""


class ShrinkArguments(ctypes.Structure):
    """What rows are shrunk with; strides are in bytes. `adapters` is the address of int32 [rows],
    `loras` that of the layer's table, `panels` the most that an adapter has in it.
    """

    _fields_ = fields("rows values stride steps adapters loras panels inner inner_stride")


@device
def _end_of_run(adapters: int, row: int, end: int) -> int:
    """Behind the last of the rows from `row` on, up to `end`, that have the same adapter."""
    adapter = load_int32(adapters + row * 4)
    row += 1
    while row < end and load_int32(adapters + row * 4) == adapter:
        row += 1
    return row


@device
def _entry_of(arguments: Any, row: int) -> int:
    """Address of the entry of a row's adapter; 0 if it has none, or one that changes nothing."""
    adapter = load_int32(arguments.adapters + row * 4)
    entry = arguments.loras + (adapter - 1) * _ADAPTER_BYTES
    return entry if adapter > 0 and load_int64(entry) > 0 else 0


@device
def _shrink_run(form: Any, arguments: Any, entry: int, panel: int, row: int, last: int) -> None:
    sums = sums_of_a_tile()
    steps = arguments.steps
    values = arguments.values + row * arguments.stride
    place = load_int64(entry + 8) + panel * steps * _VECTOR_BYTES
    narrow_product(form, last - row, values, arguments.stride, place, steps, sums)
    scales = load_floats(load_int64(entry + 16) + panel * _VECTOR_BYTES)
    inner = arguments.inner + panel * LANES * form.itemsize
    for number in range(last - row):
        scaled = multiply(load_floats(sums + number * _VECTOR_BYTES), scales)
        store_numbers(form, inner + (row + number) * arguments.inner_stride, scaled)


@device
def run_shrink(form: Any, arguments: Any) -> None:
    """Takes tiles of rows, and of each one panel, until there are none left."""
    tiles = -(-arguments.rows // TILE_ROWS)
    tasks = tiles * arguments.panels
    task, last = next_tasks(arguments, tasks)
    while task < last:
        tile, panel = divmod(task, arguments.panels)
        row, end = arguments.rows * tile // tiles, arguments.rows * (tile + 1) // tiles
        while row < end:
            behind = _end_of_run(arguments.adapters, row, end)
            entry = _entry_of(arguments, row)
            if entry and panel < load_int64(entry):
                _shrink_run(form, arguments, entry, panel, row, behind)
            row = behind
        task += 1
        if task == last:
            task, last = next_tasks(arguments, tasks)


@device
def send_for_loras(arguments: Any, panel: int, begin: int, end: int) -> None:
    """Has what `add_loras` will read brought near while the product is computed.

    A panel of B is so short that the processor does not see a stream in it: without this most of
    a step's time with adapters is that of waiting for memory, once for each panel.
    """
    row = begin
    while row < end:
        entry = _entry_of(arguments, row)
        if entry:
            outputs = load_int64(entry + 24) + panel * PANEL_VECTORS * _OUTPUTS_BYTES
            for vector in range(PANEL_VECTORS):
                place = load_int64(outputs + vector * _OUTPUTS_BYTES)
                for step in range(load_int64(outputs + vector * _OUTPUTS_BYTES + 16)):
                    prefetch(place + step * _VECTOR_BYTES)
        row = _end_of_run(arguments.adapters, row, end)


@device
def add_loras(form: Any, arguments: Any, panel: int, begin: int, end: int, sums: int) -> None:
    """Adds what their adapters make of the rows `begin` .. `end` - 1 to a panel's sums of them.

    `arguments` are those of `cpu_linear.LinearArguments`.
    """
    room = sums_of_a_tile()
    row = begin
    while row < end:
        behind = _end_of_run(arguments.adapters, row, end)
        entry = _entry_of(arguments, row)
        if entry:
            for vector in range(PANEL_VECTORS):
                number = panel * PANEL_VECTORS + vector
                outputs = load_int64(entry + 24) + number * _OUTPUTS_BYTES
                place, skipped = load_int64(outputs), load_int64(outputs + 8)
                steps, stride = load_int64(outputs + 16), arguments.inner_stride
                inner = arguments.inner + row * stride + skipped
                if steps > 0:
                    narrow_product(form, behind - row, inner, stride, place, steps, room)
                    for index in range(behind - row):
                        line = (row - begin + index) * PANEL_VECTORS + vector
                        target = sums + line * _VECTOR_BYTES
                        added = load_floats(room + index * _VECTOR_BYTES)
                        store_floats(target, add(load_floats(target), added))
        row = behind


@functools.cache
def _kernel(form: Format) -> Kernel:
    """The compiled shrinking of rows in `form`."""

    def shrink_kernel(pointer: Any) -> None:
        run_shrink(form, carray(pointer, 1)[0])

    return Kernel(shrink_kernel, ShrinkArguments)


def warm_up(dtype: torch.dtype) -> None:
    """Compiles what layers with adapters need for a dtype, or loads it."""
    if dtype in FORMATS:
        _kernel(FORMATS[dtype])


class PackedLoras:
    """What the adapters of a model change in one layer, of which one does at least.

    Args:
        loras: of each adapter, in one of `FORMATS`.
        order: int64 [outputs], in which the layer's packed weights have its outputs.
    """

    def __init__(self, loras: Loras, order: Tensor) -> None:
        down = next(factors[0].down for factors in loras if factors)
        self._step_inputs = _WORD_BYTES // down.element_size()
        self.steps = down.shape[1] // self._step_inputs
        self._kept: list[Tensor] = []
        entries = [self._pack(factors, order) if factors else (0,) * 4 for factors in loras]
        self._table = self._keep(torch.tensor(entries))
        self.panels = max(entry[0] for entry in entries)
        """Of A, that an adapter has at most."""

    @property
    def table(self) -> int:
        """Address of the adapters' entries."""
        return self._table.data_ptr()

    @property
    def inner_size(self) -> int:
        """Numbers of a shrunk row."""
        return self.panels * LANES

    def shrunk(self, values: Tensor, adapters: Tensor) -> Tensor:
        """[T, inputs] -> [T, inner size], scaled; rows without an adapter are not written."""
        inner = values.new_empty(len(values), self.inner_size)
        _kernel(FORMATS[values.dtype])(
            torch.get_num_threads(),
            len(values), values.data_ptr(), values.stride(0) * values.element_size(), self.steps,
            adapters.data_ptr(), self.table, self.panels,
            inner.data_ptr(), inner.stride(0) * inner.element_size(),
        )  # fmt: skip
        return inner

    def _keep(self, tensor: Tensor) -> Tensor:
        kept = arena.keep(tensor.contiguous())
        self._kept.append(kept)
        return kept

    def _pack(self, factors: Sequence[Factors], order: Tensor) -> tuple[int, int, int, int]:
        """The entry of one adapter, whose ranks zeros pad to whole steps."""
        ranks = [each.rank + -each.rank % self._step_inputs for each in factors]
        total = sum(ranks)
        down = factors[0].down.new_zeros(total, factors[0].down.shape[1])
        up = down.new_zeros(len(order), total)
        scales = torch.zeros(total + -total % LANES)
        begins, ends = torch.full_like(order, total), torch.zeros_like(order)
        begin = 0
        for each, rank in zip(factors, ranks, strict=True):
            inner = slice(begin, begin + each.rank)
            outputs = slice(each.first, each.first + len(each.up))
            down[inner], scales[inner], up[outputs, inner] = each.down, each.scale, each.up
            begins[outputs], ends[outputs] = begin, begin + rank
            begin += rank
        panels = self._keep(packed(down, LANES))
        kept = self._keep(scales)
        table = self._pack_up(up[order], begins[order], ends[order])
        return len(panels), panels.data_ptr(), kept.data_ptr(), table.data_ptr()

    def _pack_up(self, up: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
        """The table of B, of whose row each output needs the columns from `begins` to `ends`."""
        added = -len(up) % PANEL
        panels = packed(F.pad(up, (0, 0, 0, added)), LANES)
        begins = F.pad(begins, (0, added), value=up.shape[1]).view(-1, LANES).amin(1)
        ends = F.pad(ends, (0, added)).view(-1, LANES).amax(1)
        spans = torch.stack([begins, ends], 1) // self._step_inputs
        table = torch.zeros(len(panels), 3, dtype=torch.int64)
        for begin, end in set(map(tuple, spans.tolist())):
            if begin < end:
                chosen = (spans == torch.tensor([begin, end])).all(1).nonzero().squeeze(1)
                kept = self._keep(panels[chosen, begin:end])
                places = kept.data_ptr() + torch.arange(len(kept)) * kept[0].nbytes
                table[chosen, 0] = places
                table[chosen, 1:] = torch.tensor([begin * _WORD_BYTES, end - begin])
        return self._keep(table)
