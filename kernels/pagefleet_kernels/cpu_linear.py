"""Linear layers on the CPU, over weights that are packed once (see `cpu_gemm` for how and why).

A task is some rows times one panel. What follows a product at once is done while it is in the
caches: the bias, the rounding, and for gates and values the activation (`reference.silu_mul`, with
its roundings), whose panels hold sixteen gates and the sixteen values that they belong to.

An output's bits depend on its row and on the weights alone, whatever the batch and the threads.

A quantized matrix is packed by the same plan, and its rows are quantized first (`cpu_grouped`).
"""

import ctypes
import functools
from collections.abc import Callable
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
from pagefleet_kernels.cpu_launch import FORMATS, Kernel, fields, next_tasks
from pagefleet_kernels.cpu_simd import (
    add,
    broadcast,
    divide,
    exp,
    load_floats,
    load_numbers,
    multiply,
    negative,
    rounded,
    store_few,
    store_numbers,
)
from pagefleet_kernels.quantized import GROUP, Matrix, Quantized

_CACHE_LINE = 64

_TASK_TILES = 8
"""Tiles of rows that a task takes through a panel: their inputs stay in the second-level cache."""


class Epilogue(IntEnum):
    """What is written of a product."""

    ROUND = 0
    """Its outputs in the dtype of the inputs."""
    GATE = 1
    """silu(gate) * value of each pair, in the dtype of the inputs."""
    WIDE = 2
    """Its outputs as float32."""


class LinearArguments(ctypes.Structure):
    """What a packed linear layer hands to the compiled code; strides are in bytes, `bias` is 0
    where there is none. An output row has `columns` numbers. The values of a quantized layer are
    blocks, and its steps groups.
    """

    _fields_ = fields(
        "rows values stride panels panel_bytes panel_count steps bias epilogue "
        "output output_stride columns"
    )


_FLOAT32 = Format.FLOAT32


@device
def _store(form: Any, address: int, vector: Any, count: int) -> None:
    """Up to sixteen numbers, none if `count` is not positive."""
    if count >= LANES:
        store_numbers(form, address, vector)
    elif count > 0:
        store_few(form, address, vector, count)


@device
def _outputs(form: Any, arguments: Any, panel: int, sums: int, vector: int) -> Any:
    """One vector of a row's outputs, with the bias."""
    total = load_floats(sums + vector * LANES * 4)
    if arguments.bias:
        begin = (panel * PANEL + vector * LANES) * form.itemsize
        total = add(total, load_numbers(form, arguments.bias + begin))
    return total


@device
def _write_row(form: Any, arguments: Any, panel: int, sums: int, row: int) -> None:
    output = arguments.output + row * arguments.output_stride
    if arguments.epilogue == 1:
        gate = rounded(form, _outputs(form, arguments, panel, sums, 0))
        value = rounded(form, _outputs(form, arguments, panel, sums, 1))
        activated = rounded(form, divide(gate, add(broadcast(1.0), exp(negative(gate)))))
        begin = panel * LANES
        place = output + begin * form.itemsize
        _store(form, place, multiply(activated, value), arguments.columns - begin)
        return
    for vector in range(PANEL_VECTORS):
        total = _outputs(form, arguments, panel, sums, vector)
        begin = panel * PANEL + vector * LANES
        if arguments.epilogue == 2:
            _store(_FLOAT32, output + begin * 4, total, arguments.columns - begin)
        else:
            _store(form, output + begin * form.itemsize, total, arguments.columns - begin)


@device
def run_linear(form: Any, weights: Any, arguments: Any) -> None:
    """Takes tasks until there are none left."""
    sums = sums_of_a_tile()
    tiles = -(-arguments.rows // TILE_ROWS)
    tasks = arguments.panel_count * -(-tiles // _TASK_TILES)
    task, last = next_tasks(arguments, tasks)
    while task < last:
        group, panel = divmod(task, arguments.panel_count)
        packed = arguments.panels + panel * arguments.panel_bytes
        first = group * _TASK_TILES
        for tile in range(first, min(first + _TASK_TILES, tiles)):
            begin = arguments.rows * tile // tiles
            end = arguments.rows * (tile + 1) // tiles
            values = arguments.values + begin * arguments.stride
            steps = arguments.steps
            product(form, weights, end - begin, values, arguments.stride, packed, steps, sums)
            for row in range(begin, end):
                _write_row(form, arguments, panel, sums + (row - begin) * PANEL * 4, row)
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


class Arena:
    """Memory that tensors are moved to one after another, in large chunks.

    The system gives huge pages to large allocations only. Matrices of a megabyte or two, each in
    small pages of its own, took 15 % longer to read at one row (SmolLM2-135M).
    """

    CHUNK_BYTES = 32 << 20

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of a contiguous tensor, beside the ones before it."""
        size = -(-tensor.nbytes // _CACHE_LINE) * _CACHE_LINE
        if size > len(self._free):
            self._free = torch.empty(max(size, self.CHUNK_BYTES), dtype=torch.uint8)
        kept = self._free[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._free = self._free[size:]
        return kept.copy_(tensor)


_arena = Arena()


class PackedLinear:
    """y = x W^T + b over packed weights, and what `epilogue` makes of y."""

    def __init__(self, weight: Matrix, bias: Tensor | None, epilogue: Epilogue) -> None:
        self.columns, self.inputs = weight.shape
        if epilogue is Epilogue.GATE:
            order = _interleaved(torch.arange(self.columns))
            weight = weight.rows(order) if isinstance(weight, Quantized) else weight[order]
            bias = None if bias is None else bias[order]
            self.columns //= 2
        self.epilogue = epilogue
        if isinstance(weight, Quantized):
            self.weights, panels = Weights(weight.bits), _packed_groups(weight)
        else:
            self.weights, panels = Weights.PLAIN, _packed(weight)
        self.panels = _arena.keep(panels)
        self._bias = None if bias is None else F.pad(bias, (0, -len(bias) % PANEL))

    def arguments(self) -> dict[str, int]:
        """The fields of `LinearArguments` that never change."""
        count, steps = self.panels.shape[:2]
        return {
            "panels": self.panels.data_ptr(),
            "panel_bytes": self.panels.nbytes // count,
            "panel_count": count,
            "steps": steps,
            "bias": 0 if self._bias is None else self._bias.data_ptr(),
            "epilogue": self.epilogue,
            "columns": self.columns,
        }

    def __call__(self, values: Tensor) -> Tensor:
        """[T, inputs] -> [T, outputs]: half as many with gates, and float32 if wide."""
        values, form = values.contiguous(), FORMATS[values.dtype]
        dtype = torch.float32 if self.epilogue is Epilogue.WIDE else values.dtype
        output = values.new_empty((len(values), self.columns), dtype=dtype)
        if self.weights.grouped:
            values = cpu_layers.quantized(values)
        fixed = self.arguments()
        _kernel(form, self.weights)(
            torch.get_num_threads(),
            len(values), values.data_ptr(), values.stride(0) * values.element_size(),
            fixed["panels"], fixed["panel_bytes"], fixed["panel_count"], fixed["steps"],
            fixed["bias"], fixed["epilogue"],
            output.data_ptr(), output.stride(0) * output.element_size(), self.columns,
        )  # fmt: skip
        return output


def _layer(weight: Matrix, bias: Tensor | None, epilogue: Epilogue) -> PackedLinear | None:
    return PackedLinear(weight, bias, epilogue) if _supported(weight, epilogue) else None


def linear(weight: Matrix, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """`reference.linear`, packed for float32 and bfloat16, and for quantized weights."""
    return _layer(weight, bias, Epilogue.ROUND) or reference.linear(weight, bias)


def gated(weight: Matrix, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """`reference.gated`, packed where gates come in sixteens."""
    packed = _layer(weight, bias, Epilogue.GATE)
    if packed is not None:
        return packed
    gate_up = linear(weight, bias)
    return lambda values: cpu_layers.silu_mul(gate_up(values))


def head(weight: Matrix) -> Callable[[Tensor], Tensor]:
    """`reference.head`, packed; the sums are not rounded to bfloat16."""
    return _layer(weight, None, Epilogue.WIDE) or reference.head(weight)


def _supported(weight: Matrix, epilogue: Epilogue) -> bool:
    """Whether a step of the product takes whole words, and gates come in whole vectors."""
    if isinstance(weight, Tensor) and (
        weight.dtype not in FORMATS or weight.shape[1] * weight.element_size() % 4
    ):
        return False
    return epilogue is not Epilogue.GATE or weight.shape[0] % (2 * LANES) == 0


def _interleaved(outputs: Tensor) -> Tensor:
    """Gates, then as many values, in turns of sixteen."""
    return outputs.view(2, -1, LANES).transpose(0, 1).flatten()


def _packed(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> [panels, steps, PANEL, inputs of a step]."""
    words = F.pad(weight, (0, 0, 0, -len(weight) % PANEL)).view(torch.int32)
    panels = words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()
    return panels.unsqueeze(-1).view(weight.dtype)


def _packed_groups(weight: Quantized) -> Tensor:
    """uint8 [panels, groups, bytes of a group]: scales, minimums, and numbers as `_packed` has
    words; two of four bits share a byte, a step's below the next one's.
    """
    numbers, factors = weight.numbers, [weight.scales]
    if weight.minimums is not None:
        steps = numbers.view(len(numbers), -1, 2, 4)
        numbers = (steps[:, :, 0] | steps[:, :, 1] << 4).flatten(1)
        factors.append(weight.minimums)
    words = _packed(numbers).view(-1, weight.scales.shape[1], GROUP * PANEL * weight.bits // 8)
    rows = [
        F.pad(each, (0, 0, 0, -len(each) % PANEL)).view(-1, PANEL, each.shape[1])
        for each in factors
    ]
    heads = [each.transpose(1, 2).contiguous().view(torch.uint8) for each in rows]
    return torch.cat([*heads, words], dim=2)
