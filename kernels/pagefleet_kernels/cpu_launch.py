"""How a compiled CPU kernel is built, cached on disk, called, and spread over threads.

A kernel is a C function over one record of addresses and sizes, compiled by numba. Python fills the
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

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import pathlib
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from pagefleet_kernels.cpu_ir import (
    Format,
    device,
)
from pagefleet_kernels.cpu_simd import fetch_add, load_int64

_log = logging.getLogger(__name__)

FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}
"""The types that kernels are compiled for."""

KEPT = {**FORMATS, torch.uint8: Format.E4M3}
"""The types of keys and values."""

_WORTH_A_THREAD = 1 << 14
"""Numbers of an element-wise kernel that take as long as waking another thread."""

_ROOM = 4 << 20
"""Bytes that the compiled kernels of a version take on disk, and more."""

_VERSIONS_KEPT = 8
"""Versions of the kernels whose compiled code stays on disk."""

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


class Kernel:
    """A compiled function over a pointer to a record, ready to be called.

    The function may close over numbers and types only: a closure over another compiled function
    would never be found in the cache.
    """

    def __init__(self, function: Callable[[Any], None], record: type[ctypes.Structure]) -> None:
        _cache_by_source()
        kind = numba.from_dtype(np.dtype(record))
        with _alone(function):
            self._compiled = numba.cfunc(types.void(types.CPointer(kind)), cache=True)(function)
        self._address = self._compiled.address
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


@functools.cache
def source_digest() -> str:
    """Eight hexadecimal digits that tell versions of the CPU kernels apart."""
    digest = hashlib.sha256()
    folder = pathlib.Path(__file__).parent
    for source in (*sorted(folder.glob("cpu_*.py")), folder / "quantized.py"):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:8]


@functools.cache
def _cache_by_source() -> None:
    """Makes numba keep compiled kernels by what all sources of this package say.

    numba's own cache looks only at the file of the function that it compiles and would go on using
    an inner loop that has since been changed in another file.
    """
    if numba.config.CACHE_DIR:
        return
    try:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        folder = pathlib.Path(home, "pagefleet", "kernels", source_digest())
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as room:  # of a full or read-only disk, none
            os.posix_fallocate(room.fileno(), 0, _ROOM)
    except (OSError, RuntimeError) as error:  # the latter if this user has no home
        folder = pathlib.Path(tempfile.mkdtemp(prefix="pagefleet-kernels-"))
        _log.warning("compiled kernels are kept in %s for this run only: %s", folder, error)
    else:
        _forget_old_versions(folder)
    numba.config.CACHE_DIR = str(folder)


@contextlib.contextmanager
def _alone(function: Callable[[Any], None]) -> Iterator[None]:
    """While no other process compiles a shape of the same kernel for the same cache.

    Of two that add shapes of a kernel at once, numba's index of it would give one the other's code,
    and so to every process that comes later: with six at once, for 18 of 360 shapes.
    """
    name = f"{function.__module__}.{function.__qualname__}.lock"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # nothing can be written there, then
            lock = stack.enter_context(pathlib.Path(numba.config.CACHE_DIR, name).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _forget_old_versions(folder: pathlib.Path) -> None:
    """Leave the `_VERSIONS_KEPT` last used of this folder and its neighbours; whoever still uses
    another compiles again.
    """
    with contextlib.suppress(OSError):  # another process may do the same
        os.utime(folder)
        versions = sorted(folder.parent.iterdir(), key=lambda version: version.stat().st_mtime)
        for version in versions[:-_VERSIONS_KEPT]:
            shutil.rmtree(version, ignore_errors=True)
