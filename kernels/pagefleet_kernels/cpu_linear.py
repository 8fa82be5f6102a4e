"""Linear layers on the CPU, over weights that are packed once (see `cpu_gemm` for how and why).

A task is some rows times one panel. What follows a product at once is done while it is in the
caches: the bias, the rounding, and for gates and values the activation (`reference.gate_mul`, with
its roundings), whose panels hold sixteen gates and the sixteen values that they belong to.

An output's bits depend on its row and on the weights alone, whatever the batch and the threads.

A quantized matrix is packed by the same plan, and its rows are quantized first (`cpu_grouped`).
What adapters add comes to the sums before anything else does (`cpu_lora`).
"""

import ctypes
import functools
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from numba import carray
from torch import Tensor

from pagefleet_kernels import cpu_layers, reference
from pagefleet_kernels.cpu_gemm import PANEL, PANEL_VECTORS, TILE_ROWS, product, sums_of_a_tile
from pagefleet_kernels.cpu_grouped import Weights
from pagefleet_kernels.cpu_ir import LANES, Format, device
from pagefleet_kernels.cpu_launch import FORMATS, Kernel, address_of, fields, next_tasks
from pagefleet_kernels.cpu_lora import PackedLoras, add_loras, send_for_loras
from pagefleet_kernels.cpu_packing import arena, interleaved, packed, packed_groups
from pagefleet_kernels.cpu_simd import (
    add,
    load_floats,
    load_numbers,
    rounded,
    store_few,
    store_numbers,
)
from pagefleet_kernels.layers import Activation, HeadsLayer, Layer
from pagefleet_kernels.lora import Loras
from pagefleet_kernels.quantized import Matrix, Quantized

_TASK_TILES = 8
"""Tiles of rows that a task takes through a panel: their inputs stay in the second-level cache."""


class Epilogue(IntEnum):
    """What is written of a product."""

    ROUND = 0
    """Its outputs in the dtype of the inputs."""
    WIDE = 1
    """Its outputs as float32."""
    GATE = 2
    """A value times its gate of each pair, in the dtype of the inputs; the following say by which
    `Activation`.
    """
    GELU_GATE = 3
    CLAMPED_GATE = 4

    @classmethod
    def gating(cls, activation: Activation) -> "Epilogue":
        """That of gates and values."""
        return cls(cls.GATE + activation.value)

    @property
    def gates(self) -> bool:
        """Whether outputs come in pairs."""
        return self >= Epilogue.GATE


class LinearArguments(ctypes.Structure):
    """What a packed linear layer hands to the compiled code; strides are in bytes, `bias` is 0
    where there is none, as `loras` is (see `cpu_lora`). An output row has `columns` numbers. The
    values of a quantized layer are blocks, and its steps groups. `panels_each` are those of a head
    where each has a matrix of its own; from head to head it is `value_step` and `output_step`.
    """

    _fields_ = fields(
        "rows values stride panels panel_bytes panel_count steps bias epilogue output "
        "output_stride columns adapters loras inner inner_stride panels_each value_step output_step"
    )


_FIELDS = [name for name, _ in LinearArguments._fields_[4:]]
"""Behind those that every record has."""

_FLOAT32 = Format.FLOAT32


@device
def store(form: Any, address: int, vector: Any, count: int) -> None:
    """Up to sixteen numbers, none if `count` is not positive."""
    if count >= LANES:
        store_numbers(form, address, vector)
    elif count > 0:
        store_few(form, address, vector, count)


@device
def bias_of(form: Any, arguments: Any, panel: int) -> int:
    """Address of the bias of a panel's outputs; 0 if there is none."""
    return arguments.bias + panel * PANEL * form.itemsize if arguments.bias else 0


@device
def outputs(form: Any, bias: int, sums: int, vector: int) -> Any:
    """One vector of a row's outputs of a panel, with the bias."""
    total = load_floats(sums + vector * LANES * 4)
    if bias:
        total = add(total, load_numbers(form, bias + vector * LANES * form.itemsize))
    return total


@device
def write_row(form: Any, arguments: Any, panel: int, bias: int, sums: int, output: int) -> None:
    """A row's outputs of one panel, from its sums, as the epilogue says, to the row `output`."""
    if arguments.epilogue >= 2:
        gate = rounded(form, outputs(form, bias, sums, 0))
        value = rounded(form, outputs(form, bias, sums, 1))
        gated = cpu_layers.gate_values(form, gate, value, arguments.epilogue - 2)
        begin = panel * LANES
        store(form, output + begin * form.itemsize, gated, arguments.columns - begin)
        return
    for vector in range(PANEL_VECTORS):
        total = outputs(form, bias, sums, vector)
        begin = panel * PANEL + vector * LANES
        if arguments.epilogue == 1:
            store(_FLOAT32, output + begin * 4, total, arguments.columns - begin)
        else:
            store(form, output + begin * form.itemsize, total, arguments.columns - begin)


@device
def run_linear(form: Any, weights: Any, arguments: Any) -> None:
    """Takes tasks until there are none left."""
    sums = sums_of_a_tile()
    tiles = -(-arguments.rows // TILE_ROWS)
    tasks = arguments.panel_count * -(-tiles // _TASK_TILES)
    task, last = next_tasks(arguments, tasks)
    while task < last:
        group, panel = divmod(task, arguments.panel_count)
        place = arguments.panels + panel * arguments.panel_bytes
        head, own = divmod(panel, arguments.panels_each)
        first = group * _TASK_TILES
        for tile in range(first, min(first + _TASK_TILES, tiles)):
            begin = arguments.rows * tile // tiles
            end = arguments.rows * (tile + 1) // tiles
            values = arguments.values + begin * arguments.stride + head * arguments.value_step
            steps = arguments.steps
            if arguments.loras:
                send_for_loras(arguments, panel, begin, end)
            product(form, weights, end - begin, values, arguments.stride, place, steps, sums)
            if arguments.loras:
                add_loras(form, arguments, panel, begin, end, sums)
            bias = bias_of(form, arguments, panel)
            for row in range(begin, end):
                output = arguments.output + row * arguments.output_stride
                output += head * arguments.output_step
                write_row(form, arguments, own, bias, sums + (row - begin) * PANEL * 4, output)
        task += 1
        if task == last:
            task, last = next_tasks(arguments, tasks)


@functools.cache
def _kernel(form: Format, weights: Weights) -> Kernel:
    """The compiled product for values in `form`."""

    def linear_kernel(pointer: Any) -> None:
        run_linear(form, weights, carray(pointer, 1)[0])

    return Kernel(linear_kernel, LinearArguments)


def warm_up(dtype: torch.dtype) -> None:
    """Compiles what a packed layer of a dtype needs, or loads it."""
    if dtype in FORMATS:
        _kernel(FORMATS[dtype], Weights.PLAIN)


class PackedLinear:
    """y = x W^T + b over packed weights, and what `epilogue` makes of y."""

    def __init__(
        self, weight: Matrix, bias: Tensor | None, epilogue: Epilogue, loras: Loras = ()
    ) -> None:
        self.columns, self.inputs = weight.shape
        order = torch.arange(self.columns)
        if epilogue.gates:
            order = interleaved(order)
            weight = weight.rows(order) if isinstance(weight, Quantized) else weight[order]
            bias = None if bias is None else bias[order]
            self.columns //= 2
        self.epilogue = epilogue
        self.weights = Weights.of(weight)
        panels = packed_groups(weight) if isinstance(weight, Quantized) else packed(weight)
        self.panels = arena.keep(panels)
        self._bias = None if bias is None else F.pad(bias, (0, -len(bias) % PANEL))
        self.loras = PackedLoras(loras, order) if any(loras) else None

    def arguments(self) -> dict[str, int]:
        """The fields of `LinearArguments` that never change."""
        count, steps = self.panels.shape[:2]
        return {
            "panels": self.panels.data_ptr(),
            "panel_bytes": self.panels.nbytes // count,
            "panel_count": count,
            "steps": steps,
            "bias": address_of(self._bias),
            "epilogue": self.epilogue,
            "columns": self.columns,
            "panels_each": count,
        }

    def __call__(self, values: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, inputs] -> [T, outputs]: half as many with gates, and float32 if wide; `adapters` is
        int32 [T], see `reference.linear`.
        """
        values, form = values.contiguous(), FORMATS[values.dtype]
        dtype = torch.float32 if self.epilogue is Epilogue.WIDE else values.dtype
        output = values.new_empty((len(values), self.columns), dtype=dtype)
        added = (0, 0, 0, 0)
        if self.loras is not None and adapters is not None:
            inner = self.loras.shrunk(values, adapters)
            stride = inner.stride(0) * inner.element_size()
            added = (adapters.data_ptr(), self.loras.table, inner.data_ptr(), stride)
        if self.weights.grouped:
            values = cpu_layers.quantized(values)
        fixed = self.arguments()
        _kernel(form, self.weights)(
            torch.get_num_threads(),
            len(values), values.data_ptr(), values.stride(0) * values.element_size(),
            fixed["panels"], fixed["panel_bytes"], fixed["panel_count"], fixed["steps"],
            fixed["bias"], fixed["epilogue"],
            output.data_ptr(), output.stride(0) * output.element_size(), self.columns, *added,
            fixed["panels_each"], 0, 0,
        )  # fmt: skip
        return output


class PackedHeads:
    """`reference.by_heads` over packed weights."""

    def __init__(self, weights: Tensor) -> None:
        self._heads, self.columns, self.inputs = weights.shape
        self.panels = arena.keep(torch.stack([packed(own) for own in weights]))

    def arguments(self) -> dict[str, int]:
        """The fields of `LinearArguments` that never change."""
        each, steps = self.panels.shape[1:3]
        itemsize = self.panels.element_size()
        return {
            "panels": self.panels.data_ptr(),
            "panel_bytes": self.panels[0].nbytes // each,
            "panel_count": self._heads * each,
            "steps": steps,
            "columns": self.columns,
            "panels_each": each,
            "value_step": self.inputs * itemsize,
            "output_step": self.columns * itemsize,
        }

    def __call__(self, values: Tensor) -> Tensor:
        """[T, H, inputs] -> [T, H, outputs]."""
        values = values.contiguous()
        output = values.new_empty((*values.shape[:2], self.columns))
        record = {
            **dict.fromkeys(_FIELDS, 0),
            **self.arguments(),
            "rows": len(values),
            "values": values.data_ptr(),
            "stride": values.stride(0) * values.element_size(),
            "output": output.data_ptr(),
            "output_stride": output.stride(0) * output.element_size(),
        }
        _kernel(FORMATS[values.dtype], Weights.PLAIN)(torch.get_num_threads(), *record.values())
        return output


def _layer(
    weight: Matrix, bias: Tensor | None, epilogue: Epilogue, loras: Loras = ()
) -> PackedLinear | None:
    return PackedLinear(weight, bias, epilogue, loras) if is_packable(weight, epilogue) else None


def linear(weight: Matrix, bias: Tensor | None = None, loras: Loras = ()) -> Layer:
    """`reference.linear`, packed for float32 and bfloat16, and for quantized weights."""
    packed_layer = _layer(weight, bias, Epilogue.ROUND, loras)
    return packed_layer or reference.linear(weight, bias, loras)


def gated(
    weight: Matrix,
    bias: Tensor | None = None,
    loras: Loras = (),
    activation: Activation = Activation.SILU,
) -> Layer:
    """`reference.gated`, packed where gates come in sixteens."""
    packed_layer = _layer(weight, bias, Epilogue.gating(activation), loras)
    if packed_layer is not None:
        return packed_layer
    gate_up = linear(weight, bias, loras)
    return lambda values, adapters=None: cpu_layers.gate_mul(gate_up(values, adapters), activation)


def by_heads(weights: Tensor) -> HeadsLayer:
    """`reference.by_heads`, packed."""
    packable = is_packable(weights[0], Epilogue.ROUND)
    return PackedHeads(weights) if packable else reference.by_heads(weights)


def head(weight: Matrix) -> Layer:
    """`reference.head`, packed; the sums are not rounded to bfloat16."""
    return _layer(weight, None, Epilogue.WIDE) or reference.head(weight)


def is_packable(weight: Matrix, epilogue: Epilogue) -> bool:
    """Whether a step of the product takes whole words, and gates come in whole vectors."""
    if isinstance(weight, Tensor) and (
        weight.dtype not in FORMATS or weight.shape[1] * weight.element_size() % 4
    ):
        return False
    return not epilogue.gates or weight.shape[0] % (2 * LANES) == 0
