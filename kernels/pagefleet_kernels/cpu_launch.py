"""How a compiled CPU kernel is built, cached on disk, called, and spread over threads.

A kernel is a C function over one record of addresses and sizes, compiled by numba. Python fills the
record with `Tensor.data_ptr()` and calls the function through ctypes: no array is unboxed, which
keeps a call at a few microseconds. Threads take tasks off an atomic counter in the record, so that
a core that a neighbour holds up is left behind; which thread does a task never changes its result.

One pool of threads. Two OpenMP runtimes on the same cores spin against each other, and numba's
`omp` layer loads the system's libgomp beside the one that torch brought. So the function is given
to the runtime that torch itself runs on, by the entry point that compilers call for a parallel
region (`GOMP_parallel`; libgomp and libiomp5 both export it). The threads that did the last
`F.linear` are still awake for the next kernel, and no OMP variable needs to be set. Where a torch
build has no such runtime, kernels run on the calling thread.
"""

import ctypes
import functools
import hashlib
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from pagefleet_kernels.cpu_simd import device, fetch_add

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def fields(words: str, reals: str = "") -> list[tuple[str, type]]:
    """The `_fields_` of a kernel's record: `words` are int64 (addresses, sizes), `reals` float32.

    Every record begins with its own address and the counters of one call.
    """
    head = "here threads_started tasks_taken "
    return [
        *((name, ctypes.c_int64) for name in (head + words).split()),
        *((name, ctypes.c_float) for name in reals.split()),
    ]


@device
def thread_number(record: Any) -> Any:
    """A number for the calling thread, below the number of threads; to be asked once."""
    return fetch_add(record.here + 8, 1)


@device
def next_task(record: Any) -> Any:
    """A number that no other thread of this call gets; they count up from 0."""
    return fetch_add(record.here + 16, 1)


class Kernel:
    """A compiled function over a pointer to a record, ready to be called.

    The function may close over numbers and types only: a closure over another compiled function
    would never be found in the cache.
    """

    def __init__(self, function: Callable[[Any], None], record: type[ctypes.Structure]) -> None:
        _cache_by_source()
        kind = numba.from_dtype(np.dtype(record))
        self._compiled = numba.cfunc(types.void(types.CPointer(kind)), cache=True)(function)
        self._address = self._compiled.address
        self._function = _SIGNATURE(self._address)

    def __call__(self, record: ctypes.Structure, threads: int) -> None:
        """Runs to the end on `threads` threads, the calling one among them."""
        here = ctypes.addressof(record)
        record.here = here
        team = _team()
        if threads == 1 or team is None:
            self._function(here)
        else:
            team(self._address, here, threads, 0)


@functools.cache
def _team() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP runtime that torch uses, if there is one."""
    library = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for source in (None, str(library)):
        try:
            return _PARALLEL(("GOMP_parallel", ctypes.CDLL(source)))
        except (AttributeError, OSError):
            continue
    return None


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


@functools.cache
def _cache_by_source() -> None:
    """Makes numba keep compiled kernels by what all sources of this package say.

    numba's own cache looks only at the file of the function that it compiles and would go on using
    an inner loop that has since been changed in another file.
    """
    if numba.config.CACHE_DIR:
        return
    folder = pathlib.Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(folder.glob("cpu_*.py")):
        digest.update(source.read_bytes())
    cache = pathlib.Path.home() / ".cache" / "pagefleet" / "kernels"
    numba.config.CACHE_DIR = str(cache / digest.hexdigest()[:16])
