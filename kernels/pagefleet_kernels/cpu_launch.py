"""How a compiled CPU kernel is built, called, and spread over threads.

A kernel is a C function over one record of addresses and sizes, compiled by numba, once for all
processes (`cpu_store`), each of which loads the object file that this leaves. Python fills the
record with `Tensor.data_ptr()` and calls the function through ctypes: no array is unboxed, which
keeps a call at a few microseconds. Threads take tasks off an atomic counter in the record, so that
a core that a neighbour holds up is left behind; which thread does a task never changes its result.

One pool of threads. numba's `omp` layer works beside torch, but loads a second libgomp with threads
of its own. Here a kernel is handed to the runtime that torch itself runs on, through the entry
point that compilers call for a parallel region (`GOMP_parallel`; libgomp and libiomp5 both export
it), so a step has one pool and one setting, `torch.set_num_threads`. Measured on two cores (medians
of 300; idle neighbours): an empty call takes 3.2 us on two threads and 1.3 us on one, numba's
smallest `prange` 2.9 us. F.linear and a kernel in turns cost the sum of both alone, with either
pool, so OMP_WAIT_POLICY is best left unset: `passive` made F.linear take 72 us instead of 41. Busy
neighbours turn that round, because a region waits for its last thread: give a worker its own cores.
Where a torch build has no such runtime, kernels run on the calling thread.
"""

import ctypes
import functools
import pathlib
import struct
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding
from numba import types
from numba.core import registry
from torch import Tensor

from pagefleet_kernels import cpu_store
from pagefleet_kernels.cpu_ir import (
    Format,
    device,
)
from pagefleet_kernels.cpu_simd import fetch_add, load_int64

FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}
"""The types that kernels are compiled for."""

KEPT = {**FORMATS, torch.uint8: Format.E4M3}
"""The types of keys and values."""

_WORTH_A_THREAD = 1 << 14
"""Numbers of an element-wise kernel that take as long as waking another thread."""

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def fields(words: str, reals: str = "") -> list[tuple[str, type]]:
    """The `_fields_` of a kernel's record: `words` are int64 (addresses, sizes), `reals` float32.

    Every record begins with its own address, the number of threads and the counters of one call.
    """
    head = "here threads threads_started tasks_taken "
    return [
        *((name, ctypes.c_int64) for name in (head + words).split()),
        *((name, ctypes.c_float) for name in reals.split()),
    ]


@device
def thread_number(record: Any) -> Any:
    """A number for the calling thread, below the number of threads; to be asked once."""
    return fetch_add(record.here + 16, 1)


@device
def next_task(record: Any) -> Any:
    """A number that no other thread of this call gets; they count up from 0."""
    return fetch_add(record.here + 24, 1)


@device
def next_tasks(record: Any, count: int) -> Any:
    """Begin and end of some numbers below `count` that no other thread of this call gets; an empty
    range when there are none left.

    The fewer are left, the fewer are taken (Polychronopoulos and Kuck, "Guided self-scheduling",
    IEEE Trans. Comput. C-36(12), 1987): a thread reads far along in memory, yet all end together.
    """
    left = count - load_int64(record.here + 24)
    share = max(left // (2 * record.threads), 1)
    begin = fetch_add(record.here + 24, share)
    return begin, min(begin + share, count)


def address_of(tensor: Tensor | None) -> int:
    """Where its numbers are; 0 if there is none."""
    return 0 if tensor is None else tensor.data_ptr()


class Kernel:
    """A compiled function over a pointer to a record, ready to be called.

    The function may close over numbers and types only: see `cpu_store.kept`.
    """

    def __init__(self, function: Callable[[Any], None], record: type[ctypes.Structure]) -> None:
        code = cpu_store.kept(function, lambda: _compile(function, record))
        self._engine = _load(code.machine_code)
        self._address = self._engine.get_function_address(code.symbol)
        self._function = _SIGNATURE(self._address)
        codes = ["q" if field[1] is ctypes.c_int64 else "f" for field in record._fields_]
        self._pack = struct.Struct("".join(codes))

    def __call__(self, threads: int, *values: float) -> None:
        """Runs to the end on `threads` threads, the calling one among them.

        Args:
            threads: at least 1.
            values: the record's fields after its head, in order.
        """
        record = ctypes.create_string_buffer(self._pack.size)
        here = ctypes.addressof(record)
        self._pack.pack_into(record, 0, here, threads, 0, 0, *values)
        team = _team() if threads > 1 else None
        if team is None:
            self._function(here)
        else:
            team(self._address, here, threads, 0)


def _compile(function: Callable[[Any], None], record: type[ctypes.Structure]) -> cpu_store.Code:
    kind = numba.from_dtype(np.dtype(record))
    compiled = numba.cfunc(types.void(types.CPointer(kind)))(function)
    library = compiled._library
    if library.has_dynamic_globals:
        raise ValueError(f"{function.__qualname__} holds an address, which other processes lack.")
    _, _, (machine_code, _) = library.serialize_using_object_code()
    return cpu_store.Code(compiled.native_name, machine_code)


def _load(machine_code: bytes) -> Any:
    """What holds the code in memory; one for each kernel, as symbols of two may be the same."""
    registry.cpu_target.target_context.refresh()  # or addresses of what it calls would be zeros
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(machine_code))
    engine.finalize_object()
    return engine


def barrier_address() -> int:
    """Of a function at which the threads of a call wait for each other; 0 if there is none."""
    runtime = _runtime()
    if runtime is None:
        return 0
    return ctypes.cast(runtime.GOMP_barrier, ctypes.c_void_p).value or 0


def threads_for(numbers: int) -> int:
    """Threads for an element-wise kernel over so many numbers."""
    return torch.get_num_threads() if numbers > 2 * _WORTH_A_THREAD else 1


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch uses, if it has the entry points of GNU's."""
    library = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for source in (None, str(library)):
        try:
            runtime = ctypes.CDLL(source)
        except OSError:
            continue
        if hasattr(runtime, "GOMP_parallel") and hasattr(runtime, "GOMP_barrier"):
            return runtime
    return None


@functools.cache
def _team() -> Callable[[int, int, int, int], None] | None:
    """Calls a function on a team of threads, if there is a runtime that can."""
    runtime = _runtime()
    return None if runtime is None else _PARALLEL(("GOMP_parallel", runtime))


class Scratch(threading.local):
    """Memory that outlives a call, one of each name for each calling thread; it only grows."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[np.ndarray[Any, Any], int]] = {}

    def address(self, name: str, size: int) -> int:
        """At least `size` bytes on a cache line's border; zero when they are new."""
        memory, address = self._held.get(name, (None, 0))
        if memory is None or memory.nbytes < size + 64:
            memory = np.zeros(size + 64, np.uint8)
            address = -(-memory.ctypes.data // 64) * 64
            self._held[name] = memory, address
        return address
