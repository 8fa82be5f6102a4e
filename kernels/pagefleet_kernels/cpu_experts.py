"""Mixtures of experts on the CPU: `reference.experts` over weights that are packed once.

A step goes through five stages. The router's product is that of any linear layer; then each row is
*routed*, by itself, and the rows of all experts are *sorted* into slots (`cpu_routing`), so that
the matrices of an expert are read once for all its rows; those of one that nobody takes are never
read. *Gates* multiplies the rows of an expert, wherever they lie, with a panel of its gates and
values. *Sums* multiplies what comes of that with panels of outputs, weights it and adds it up: a
thread has some panels to itself, and goes through all experts.

So an output is a sum in the order of the experts, whose summands are chains in the order of the
inputs (`cpu_gemm`), and what its row is beside does not change a bit of it.
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_kernels import cpu_layers, reference
from pagefleet_kernels.cpu_expert_products import (
    GatesArguments,
    SumsArguments,
    gates_kernel,
    sums_kernel,
)
from pagefleet_kernels.cpu_gemm import (
    PANEL,
)
from pagefleet_kernels.cpu_grouped import Weights, blocks_size
from pagefleet_kernels.cpu_ir import LANES
from pagefleet_kernels.cpu_launch import FORMATS, Kernel, address_of
from pagefleet_kernels.cpu_linear import (
    Epilogue,
    PackedLinear,
    is_packable,
)
from pagefleet_kernels.cpu_packing import arena, interleaved, packed, packed_groups
from pagefleet_kernels.cpu_routing import (
    GROUP_BYTES,
    GROUP_ROWS,
    RouteArguments,
    SortArguments,
    route_kernel,
    sort_kernel,
)
from pagefleet_kernels.experts import Experts
from pagefleet_kernels.layers import Layer
from pagefleet_kernels.quantized import Matrix, Quantized


def _call(kernel: Kernel, record: type[ctypes.Structure], **values: float) -> None:
    names = [field[0] for field in record._fields_[4:]]  # behind those that every record has
    kernel(torch.get_num_threads(), *(values[name] for name in names))


@dataclass(frozen=True)
class Panels:
    """A matrix of all experts: [experts, panels of one, ...]."""

    weights: Weights
    panels: Tensor
    bias: Tensor | None
    """[experts, outputs of all panels of one]."""

    @classmethod
    def of(cls, experts: Experts, matrix: Matrix, bias: Tensor | None, *, gates: bool) -> "Panels":
        """Packed one by one; `gates`: as `cpu_linear` packs gates and their values."""
        panels: Tensor | None = None
        rows = matrix.shape[0] // experts.count
        order = interleaved(torch.arange(rows)) if gates else torch.arange(rows)
        for number, (part, _) in enumerate(experts.parts(matrix)):
            if gates:
                part = part.rows(order) if isinstance(part, Quantized) else part[order]
            own = packed_groups(part) if isinstance(part, Quantized) else packed(part)
            if panels is None:
                panels = arena.room((experts.count, *own.shape), own.dtype)
            panels[number] = own
        assert panels is not None
        if bias is not None:
            bias = F.pad(bias.view(experts.count, rows)[:, order], (0, -rows % PANEL))
        return cls(Weights.of(matrix), panels, bias)

    def arguments(self, values: Tensor) -> dict[str, int]:
        """Of a product with such rows."""
        count, steps = self.panels.shape[1:3]
        return {
            "values": values.data_ptr(),
            "stride": _stride(values),
            "panels": self.panels.data_ptr(),
            "panel_bytes": self.panels[0].nbytes // count,
            "panel_count": count,
            "steps": steps,
            "bias": address_of(self.bias),
        }


def _in_whole_vectors(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else F.pad(numbers.float(), (0, -len(numbers) % LANES))


def _stride(rows: Tensor) -> int:
    return rows.stride(0) * rows.element_size()


class PackedExperts:
    """`reference.experts` over packed weights."""

    def __init__(self, experts: Experts) -> None:
        self.routing, self.choices, self.count = experts.routing, experts.choices, experts.count
        self.inner_size, self.size = experts.down.shape[1], experts.router.shape[1]
        self._correction = _in_whole_vectors(experts.correction)
        self.router = PackedLinear(experts.router, experts.router_bias, Epilogue.WIDE)
        self.gates = Panels.of(experts, experts.gate_up, experts.gate_up_bias, gates=True)
        self.sums = Panels.of(experts, experts.down, experts.down_bias, gates=False)
        self._epilogue = Epilogue.gating(experts.activation)

    def __call__(self, values: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, size] -> [T, size]; no adapter changes it."""
        values, form, rows = values.contiguous(), FORMATS[values.dtype], len(values)
        room, output = Room(self, rows, values.dtype), torch.empty_like(values)
        room.scores[:, : self.router.columns] = self.router(values)
        _call(route_kernel(), RouteArguments, rows=rows, **self.route(room))
        _call(sort_kernel(), SortArguments, rows=rows, **self.sort(room))
        if self.gates.weights.grouped:
            values = cpu_layers.quantized(values)
        gate = self.gate(room, values)
        _call(gates_kernel(form, self.gates.weights), GatesArguments, **gate)
        inner = cpu_layers.quantized(room.inner) if self.sums.weights.grouped else room.inner
        add_up = self.add_up(room, inner, output)
        _call(sums_kernel(form, self.sums.weights), SumsArguments, rows=rows, **add_up)
        return output

    def score(self, room: "Room", values: Tensor) -> dict[str, int]:
        """`LinearArguments` of the router, without the number of rows as all that follow."""
        return {
            **self.router.arguments(),
            "values": values.data_ptr(),
            "stride": _stride(values),
            "output": room.scores.data_ptr(),
            "output_stride": _stride(room.scores),
        }

    def route(self, room: "Room") -> dict[str, float]:
        """`RouteArguments`."""
        routing = self.routing
        return {
            "scores": room.scores.data_ptr(),
            "stride": _stride(room.scores),
            "choices": self.choices,
            "chosen": routing.chosen,
            "shared": routing.shared,
            "weighted": routing.other_scores,
            "sigmoid": routing.sigmoid,
            "renormalized": routing.renormalized,
            "groups": routing.groups,
            "open_groups": routing.open_groups,
            "factor": routing.factor,
            "correction": address_of(self._correction),
            "worths": room.worths.data_ptr(),
            "worths_stride": _stride(room.worths),
            "taken": room.taken.data_ptr(),
            "factors": room.factors.data_ptr(),
        }

    def sort(self, room: "Room") -> dict[str, int]:
        """`SortArguments`."""
        return {
            "taken": room.taken.data_ptr(),
            "factors": room.factors.data_ptr(),
            "each": self.routing.taken,
            "experts": self.count,
            "ends": room.ends.data_ptr(),
            **room.sorted(),
        }

    def gate(self, room: "Room", values: Tensor) -> dict[str, int]:
        """`GatesArguments`, of rows as the matrices want them."""
        return {
            **self.gates.arguments(values),
            "epilogue": self._epilogue,
            "output": room.inner.data_ptr(),
            "output_stride": _stride(room.inner),
            "columns": self.inner_size,
            "numbers": room.numbers.data_ptr(),
            "groups": room.groups.data_ptr(),
        }

    def add_up(self, room: "Room", inner: Tensor, output: Tensor) -> dict[str, int]:
        """`SumsArguments`, of slots as the matrices want them."""
        return {
            **self.sums.arguments(inner),
            "output": output.data_ptr(),
            "output_stride": _stride(output),
            "columns": self.size,
            "slots": room.slots.data_ptr(),
            "sums": room.totals.data_ptr(),
            "sums_stride": _stride(room.totals),
            **room.sorted(),
        }


class Room:
    """Where up to `rows` rows are on their way through experts of some sizes."""

    def __init__(self, experts: PackedExperts, rows: int, dtype: torch.dtype) -> None:
        slots = rows * experts.routing.taken
        columns = experts.router.columns
        self.scores = torch.empty(rows, columns + -columns % LANES)
        self.worths = torch.empty(rows, self.scores.shape[1] + experts.routing.groups)
        self.taken = torch.empty(slots, dtype=torch.int64)
        self.factors, self.weights = torch.empty(slots), torch.empty(slots)
        self.ends = torch.empty(experts.count, dtype=torch.int64)
        self.numbers, self.slots = torch.empty_like(self.taken), torch.arange(slots)
        most = slots // GROUP_ROWS + min(slots, experts.count)
        self.groups = torch.empty(1 + most * GROUP_BYTES // 8, dtype=torch.int64)
        self.inner = torch.empty(slots, experts.inner_size, dtype=dtype)
        self.blocks = torch.empty(slots, blocks_size(experts.inner_size), dtype=torch.uint8)
        self.totals = torch.empty(rows, experts.sums.panels.shape[1] * PANEL)

    def sorted(self) -> dict[str, int]:
        """Where sorting leaves what it found."""
        return {
            "numbers": self.numbers.data_ptr(),
            "weights": self.weights.data_ptr(),
            "groups": self.groups.data_ptr(),
        }


def experts(weights: Experts) -> Layer:
    """`reference.experts`, packed where the matrices can be."""
    (gate_up, _), (down, _) = (
        next(weights.parts(matrix)) for matrix in (weights.gate_up, weights.down)
    )
    packable = (
        is_packable(weights.router, Epilogue.WIDE)
        and is_packable(gate_up, Epilogue.GATE)
        and is_packable(down, Epilogue.ROUND)
    )
    return PackedExperts(weights) if packable else reference.experts(weights)
