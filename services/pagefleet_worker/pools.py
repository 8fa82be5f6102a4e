"""The KV pool: one tensor of all layers' blocks, and how many blocks it gets.

A number of blocks wins over a number of bytes, and bytes over a guess. The guess is half a GiB on
a CPU, where memory is shared with everything else; on a GPU it is what a full step of the model
leaves of the share that the worker may use.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet.settings import WorkerSettings
from pagefleet_worker.config import DecoderConfig
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
    config: DecoderConfig,
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
    config: DecoderConfig, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The pool, all zeros: [layers, 2, N, G, S, D]; index 0 of the second axis holds the keys."""
    shape = (config.layers, 2, blocks, config.kv_heads, block_size, config.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def _left_over(device: torch.device, share: float, profile: Callable[[], object]) -> int:
    """Bytes that this process may still take when a full step is at its peak."""
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached - peak - (1 - share) * total)
