"""The KV pool: one tensor of all layers' blocks, and how many blocks it gets.

A number of blocks wins over a number of bytes, and bytes over a guess. The guess is half a GiB on
a CPU, where memory is shared with everything else; on a GPU it is what a full step of the model
leaves of the share that the worker may use.

On a CPU the kernel finds the memory when it is written first, which takes a second for half a GiB:
a thread sees to that (`populate`) once the worker is ready, so that few steps have to.
"""

import ctypes
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet.settings import WorkerSettings
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.paging.causal_model import ModelShape
from pagefleet_worker.paging.transfer import to_device

_CPU_BYTES = 1 << 29

_MADV_POPULATE_WRITE = 23
"""madvise(2), since Linux 5.14: make the pages of a range be there, whatever they hold."""

_SWAPPED_AT_ONCE = 32
"""Blocks that are gathered before they are sent to the host, or the other way round."""


@dataclass(frozen=True)
class PoolSize:
    """How large a pool is, and `why`, to be read after "because"."""

    blocks: int
    block_bytes: int
    why: str

    def __str__(self) -> str:
        mebibytes = self.blocks * self.block_bytes / 2**20
        return f"KV pool of {self.blocks} blocks, {mebibytes:.0f} MiB, because {self.why}"


def choose_size(
    config: ModelShape,
    settings: WorkerSettings,
    dtype: torch.dtype,
    device: torch.device,
    profile: Callable[[], object],
) -> PoolSize:
    """Decide how many blocks the pool gets.

    Args:
        config: sizes of the model.
        settings: num_blocks, kv_cache_memory and gpu_memory_utilization decide.
        dtype: of keys and values.
        device: where the pool will be.
        profile: runs the largest step there can be; called on a GPU only, and only to guess.

    Raises:
        ModelError: not a single block fits.
    """
    elements = config.planes * config.layers * config.kv_size * settings.block_size
    block_bytes = elements * dtype.itemsize
    if settings.num_blocks is not None:
        return PoolSize(settings.num_blocks, block_bytes, "--num-blocks says so")
    if settings.kv_cache_memory is not None:
        available, why = settings.kv_cache_memory, "--kv-cache-memory says so"
    elif device.type == "cpu":
        available, why = _CPU_BYTES, "that is a CPU's default (--kv-cache-memory)"
    else:
        share = settings.gpu_memory_utilization
        available = _left_over(device, share, profile)
        why = f"a full step leaves so much of {share:.0%} of the device"
    if available < block_bytes:
        raise ModelError(
            f"One KV block takes {block_bytes} bytes, but only {max(available, 0)} are there. "
            "Give more with --kv-cache-memory, on a GPU with --gpu-memory-utilization too, or make "
            "blocks smaller with --block-size."
        )
    return PoolSize(available // block_bytes, block_bytes, why)


def make_pool(
    config: ModelShape, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The pool, all zeros: [layers, planes, N, G, S, D]; index 0 of the second axis holds the keys,
    or latents, index 1 the values.

    On a CPU the keys and the values of a block are neighbours, so that a thread reads longer on.
    """
    block = (config.kv_heads, block_size, config.head_dim)
    if device.type != "cpu":
        shape = (config.layers, config.planes, blocks, *block)
        return torch.zeros(shape, dtype=dtype, device=device)
    return _zeros((config.layers, blocks, config.planes, *block), dtype).transpose(1, 2)


def _zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Fresh memory of the kernel, in huge pages, because a sequence's blocks lie anywhere."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory would get small ones
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError) as error:
        raise ModelError(
            f"There is no memory for a pool of {nbytes >> 20} MiB: ask for less by "
            "--kv-cache-memory, --num-blocks or --swap-space."
        ) from error
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _pinned_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Fresh memory that a GPU reads and writes by itself, while it is a tensor's.

    torch's own pinned memory is a power of two of bytes, up to twice as much as was asked for.
    """
    tensor, cuda = _zeros(shape, dtype), torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    status = int(cuda.cudaHostRegister(address, tensor.nbytes, 0))
    if status != 0:
        raise ModelError(
            f"The {tensor.nbytes} bytes of --swap-space cannot be pinned (CUDA's error {status}). "
            "Give less, or raise the limit of locked memory (ulimit -l)."
        )
    weakref.finalize(tensor.untyped_storage(), cuda.cudaHostUnregister, address).atexit = False
    return tensor


def populate(pool: Tensor) -> threading.Thread:
    """Let the memory of a CPU's pool be found aside; what is written meanwhile stays.

    A kernel that does not know how does it at the first write to each page.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    thread = threading.Thread(
        target=madvise, args=(pool.data_ptr(), pool.nbytes, _MADV_POPULATE_WRITE), daemon=True
    )
    thread.start()
    return thread


def make_host_pool(pool: Tensor, nbytes: int) -> Tensor | None:
    """A pool of the same layout in host memory, of at most `nbytes`; None if that is no block.

    Beside a GPU it is pinned, and a block lies in one piece, so that copies need not wait for the
    processor.

    Raises:
        ModelError: so much memory cannot be had, or pinned.
    """
    blocks = nbytes // (pool.nbytes // pool.shape[2])
    if blocks == 0:
        return None
    if pool.device.type == "cpu":
        return _zeros((*pool.shape[:2], blocks, *pool.shape[3:]), pool.dtype)
    shape = (blocks, *pool.shape[:2], *pool.shape[3:])
    return _pinned_zeros(shape, pool.dtype).movedim(0, 2)


def swap_blocks(source: Tensor, target: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks from one pool to another; pairs are (source block, target block).

    Between a GPU and the host it is ordered on the current stream, and waited for by nobody.
    """
    sources, targets = zip(*pairs, strict=True)
    if source.device == target.device:
        moved = source.index_select(2, to_device(sources, source.device))
        target.index_copy_(2, to_device(targets, target.device), moved)
        return
    for first in range(0, len(pairs), _SWAPPED_AT_ONCE):
        part = slice(first, first + _SWAPPED_AT_ONCE)
        if target.device.type == "cpu":
            take_out(source, target, sources[part], targets[part])
        else:
            bring_in(source, target, sources[part], targets[part])


def take_out(pool: Tensor, host: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Blocks of a GPU's pool to the host's: gathered there, then a copy for each."""
    moved = pool.movedim(2, 0).index_select(0, to_device(sources, pool.device))
    for target, block in zip(targets, moved, strict=True):
        host[:, :, target].copy_(block, non_blocking=True)


def bring_in(host: Tensor, pool: Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Blocks of the host's pool to a GPU's: a copy for each, then scattered there."""
    shape = (len(sources), *pool.shape[:2], *pool.shape[3:])
    moved = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    for source, block in zip(sources, moved, strict=True):
        block.copy_(host[:, :, source], non_blocking=True)
    pool.index_copy_(2, to_device(targets, pool.device), moved.movedim(0, 2))


def measure_swap(pool: Tensor, host_pool: Tensor) -> float:
    """Microseconds that moving a block between the pools takes; block 0 of both is overwritten."""
    pairs = [(block, block) for block in range(min(8, pool.shape[2], host_pool.shape[2]))]
    fastest = math.inf
    for _ in range(3):
        began = time.perf_counter()
        swap_blocks(pool, host_pool, pairs)
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
        fastest = min(fastest, time.perf_counter() - began)
    return fastest / len(pairs) * 1e6


def _left_over(device: torch.device, share: float, profile: Callable[[], object]) -> int:
    """Bytes that this process may still take when a full step is at its peak."""
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached - peak - (1 - share) * total)
