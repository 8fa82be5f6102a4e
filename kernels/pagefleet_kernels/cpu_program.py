"""Many kernel calls on the CPU as one: a program of stages, run by a team of threads.

A small batch leaves a processor so little to do that Python between kernels costs as much as the
kernels. A program is written down once: for each stage which kernel, and a record with what it is
called with. From step to step a few fields of the records change, whole columns at a time. Then
compiled code goes from stage to stage; its threads meet at a barrier before each.
"""

import ctypes
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numpy.typing import NDArray

from pagefleet_kernels import cpu_attention, cpu_cache, cpu_layers
from pagefleet_kernels.cpu_expert_products import (
    GatesArguments,
    SumsArguments,
    run_gates,
    run_sums,
)
from pagefleet_kernels.cpu_grouped import Weights
from pagefleet_kernels.cpu_ir import (
    Format,
    constant_in_kernels,
    device,
    intrinsic,
    pointer,
)
from pagefleet_kernels.cpu_launch import Kernel, barrier_address, fields
from pagefleet_kernels.cpu_linear import LinearArguments, run_linear
from pagefleet_kernels.cpu_lora import ShrinkArguments, run_shrink
from pagefleet_kernels.cpu_routing import RouteArguments, SortArguments, run_route, run_sort
from pagefleet_kernels.cpu_rows import Block
from pagefleet_kernels.cpu_simd import load_int64


class Stage(IntEnum):
    """Which kernel a stage calls."""

    LINEAR = 0
    NORM = 1
    ROTARY = 2
    ATTENTION = 3
    QUANTIZE = 4
    SHRINK = 5
    ROUTER = 6
    """A linear layer whose weights are plain whatever the others are."""
    ROUTE = 7
    SORT = 8
    GATES = 9
    SUMS = 10


@dataclass(frozen=True)
class _Record:
    """A record type that kernels can find at an address."""

    kind: type[ctypes.Structure]


constant_in_kernels(_Record)

_RECORDS = {
    Stage.LINEAR: LinearArguments,
    Stage.NORM: cpu_layers.NormArguments,
    Stage.ROTARY: cpu_cache.Arguments,
    Stage.ATTENTION: cpu_attention.Arguments,
    Stage.QUANTIZE: cpu_layers.QuantizeArguments,
    Stage.SHRINK: ShrinkArguments,
    Stage.ROUTER: LinearArguments,
    Stage.ROUTE: RouteArguments,
    Stage.SORT: SortArguments,
    Stage.GATES: GatesArguments,
    Stage.SUMS: SumsArguments,
}
_LINEAR, _NORM, _ROTARY, _ATTENTION, _QUANTIZE, _SHRINK = (
    _Record(_RECORDS[Stage(number)]) for number in range(6)
)
_ROUTE, _SORT, _GATES, _SUMS = (_Record(_RECORDS[Stage(number)]) for number in range(7, 11))


_PLAIN = Weights.PLAIN


class ProgramArguments(ctypes.Structure):
    """Which stages to run: pairs of int64 (`Stage`, address of its record); 0 as `barrier` if there
    is one thread.
    """

    _fields_ = fields("stages first last barrier")


@intrinsic
def _record_at(typing: Any, record: Any, address: Any) -> Any:
    """The record at an address, as a pointer for `carray`."""
    target = types.CPointer(numba.from_dtype(np.dtype(record.value.kind)))

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[1], context.get_value_type(target))

    return target(record, types.int64), lower


@intrinsic
def _meet(typing: Any, function: Any) -> Any:
    """Calls the function without arguments at an address."""

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(pointer(builder, arguments[0], ir.FunctionType(ir.VoidType(), [])), [])
        return context.get_dummy_value()

    return types.void(types.int64), lower


@device
def _run_experts(form: Any, weights: Any, stage: int, place: int) -> None:
    if stage == 6:
        run_linear(form, _PLAIN, carray(_record_at(_LINEAR, place), 1)[0])
    elif stage == 7:
        run_route(carray(_record_at(_ROUTE, place), 1)[0])
    elif stage == 8:
        run_sort(carray(_record_at(_SORT, place), 1)[0])
    elif stage == 9:
        run_gates(form, weights, carray(_record_at(_GATES, place), 1)[0])
    else:
        run_sums(form, weights, carray(_record_at(_SUMS, place), 1)[0])


@device
def _run(
    form: Any, kept: Any, weights: Any, experts: Any, narrow: Any, wide: Any, arguments: Any
) -> None:
    for number in range(arguments.first, arguments.last):
        if arguments.barrier and number > arguments.first:
            _meet(arguments.barrier)
        stage = load_int64(arguments.stages + number * 16)
        place = load_int64(arguments.stages + number * 16 + 8)
        if stage == 0:
            run_linear(form, weights, carray(_record_at(_LINEAR, place), 1)[0])
        elif stage == 1:
            cpu_layers.run_norm(form, carray(_record_at(_NORM, place), 1)[0])
        elif stage == 2:
            cpu_cache.run_cache(form, kept, carray(_record_at(_ROTARY, place), 1)[0])
        elif stage == 4:
            cpu_layers.run_quantize(form, carray(_record_at(_QUANTIZE, place), 1)[0])
        elif stage == 5:
            run_shrink(form, carray(_record_at(_SHRINK, place), 1)[0])
        elif stage == 3:
            cpu_attention.run_attention(narrow, wide, carray(_record_at(_ATTENTION, place), 1)[0])
        elif experts is not None:
            _run_experts(form, experts, stage, place)


@functools.cache
def compile_program(
    form: Format, weights: Weights, narrow: Block, wide: Block, experts: Weights | None = None
) -> Kernel:
    """The code of programs for one type of numbers and of weights, those of experts too, and one
    shape of attention; without experts it has no stages of them, which take seconds to compile.
    """
    kept = narrow.kept

    def program_kernel(pointer: Any) -> None:
        _run(form, kept, weights, experts, narrow, wide, carray(pointer, 1)[0])

    return Kernel(program_kernel, ProgramArguments)


class Program:
    """Stages in their order, and `records`: of each kernel one array, a stage's record an entry."""

    def __init__(
        self,
        form: Format,
        weights: Weights,
        narrow: Block,
        wide: Block,
        experts: Weights | None = None,
    ) -> None:
        """See `cpu_attention.Shape` for the blocks, `compile_program` for the weights."""
        self._kernel = compile_program(form, weights, narrow, wide, experts)
        self._stages: list[tuple[Stage, int]] = []
        self._written: dict[Stage, list[dict[str, float]]] = {stage: [] for stage in Stage}
        self.records: dict[Stage, NDArray[np.void]] = {}
        self._table = np.empty((0, 2), np.int64)
        self._threads = 1
        self._borders = [0]

    def add(self, stage: Stage, **values: float) -> None:
        """Append a stage; fields that are not named are 0."""
        self._stages.append((stage, len(self._written[stage])))
        self._written[stage].append(values)

    def end_section(self) -> None:
        """End a section with the last stage that was added."""
        self._borders.append(len(self._stages))

    @property
    def sections(self) -> Iterator[tuple[int, int]]:
        """The first stage of each section, and the first behind it."""
        return itertools.pairwise(self._borders)

    def __getitem__(self, number: int) -> Stage:
        return self._stages[number][0]

    def close(self) -> None:
        """Lay out the records; nothing can be added any more."""
        for stage, written in self._written.items():
            records = np.zeros(len(written), np.dtype(_RECORDS[stage]))
            records["here"] = records.ctypes.data + np.arange(len(written)) * records.itemsize
            for record, values in zip(records, written, strict=True):
                for name, value in values.items():
                    record[name] = value
            self.records[stage] = records
        places = [(stage, self.records[stage]["here"][index]) for stage, index in self._stages]
        self._table = np.array(places, np.int64)

    def rewind(self, threads: int) -> None:
        """Let every stage be run once more, by so many threads."""
        self._threads = threads
        for records in self.records.values():
            if len(records):
                records["threads"] = threads
                records["threads_started"] = records["tasks_taken"] = 0

    def run(self, first: int, last: int) -> None:
        """Run the stages `first` .. `last` - 1."""
        barrier = barrier_address() if self._threads > 1 else 0
        self._kernel(self._threads, self._table.ctypes.data, first, last, barrier)
