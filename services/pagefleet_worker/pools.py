"""The KV pool: one tensor of all layers' blocks, and how many blocks it gets.

A number of blocks wins over a number of bytes, and bytes over a guess. The guess is half a GiB on
a CPU, where memory is shared with everything else; on a GPU it is what a full step of the model
leaves of the share that the worker may use.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet.settings import WorkerSettings
from pagefleet_worker.causal_model import ModelShape
from pagefleet_worker.model_files import ModelError

_CPU_BYTES = 1 << 29


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
    elements = 2 * config.layers * config.kv_size * settings.block_size
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
            "Give more with --kv-cache-memory, or make blocks smaller with --block-size."
        )
    return PoolSize(available // block_bytes, block_bytes, why)


def make_pool(
    config: ModelShape, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The pool, all zeros: [layers, 2, N, G, S, D]; index 0 of the second axis holds the keys."""
    shape = (config.layers, 2, blocks, config.kv_heads, block_size, config.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def make_host_pool(pool: Tensor, nbytes: int) -> Tensor | None:
    """A pool of the same layout in host memory, of at most `nbytes`; None if that is no block.

    Pinned beside a GPU, so that copies need not wait for the processor.
    """
    blocks = nbytes // (pool.nbytes // pool.shape[2])
    if blocks == 0:
        return None
    shape = (*pool.shape[:2], blocks, *pool.shape[3:])
    return torch.zeros(shape, dtype=pool.dtype, pin_memory=pool.device.type == "cuda")


def swap_blocks(source: Tensor, target: Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy whole blocks from one pool to another; pairs are (source block, target block)."""
    sources, targets = (torch.tensor(blocks) for blocks in zip(*pairs, strict=True))
    moved = source.index_select(2, sources.to(source.device))
    target.index_copy_(2, targets.to(target.device), moved.to(target.device))


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
