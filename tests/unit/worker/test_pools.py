import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagefleet.settings import WorkerSettings
from pagefleet_worker.model.config import load_config
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.paging.pools import choose_size, make_host_pool, make_pool, populate

CPU = torch.device("cpu")


def never() -> None:
    raise AssertionError("a CPU is not profiled")


@pytest.mark.parametrize(
    ("settings", "bytes_given", "why"),
    [
        ({}, 2**29, "a CPU's default"),
        ({"kv_cache_memory": 10**6}, 10**6, "--kv-cache-memory"),
        ({"kv_cache_memory": 10**6, "block_size": 8}, 10**6, "--kv-cache-memory"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_fills_what_it_is_given(
    settings: dict[str, Any],
    bytes_given: int,
    why: str,
    dtype: torch.dtype,
    prepared_model: Callable[[str], Path],
) -> None:
    config = load_config(prepared_model("qwen3"))
    worker = WorkerSettings(**settings)
    size = choose_size(config, worker, dtype, CPU, never)
    pool = make_pool(config, size.blocks, worker.block_size, dtype, CPU)
    assert pool.shape == (3, 2, size.blocks, 2, worker.block_size, 32)
    assert pool.nbytes == size.blocks * size.block_bytes
    assert 0 <= bytes_given - pool.nbytes < size.block_bytes
    assert why in str(size)


def test_latents_are_kept_once(prepared_model: Callable[[str], Path]) -> None:
    config, settings = load_config(prepared_model("deepseek-v3")), WorkerSettings(num_blocks=7)
    size = choose_size(config, settings, torch.bfloat16, CPU, never)
    pool = make_pool(config, size.blocks, 16, torch.bfloat16, CPU)
    assert pool.shape == (3, 1, 7, 1, 16, 48 + 16)
    assert pool.nbytes == size.blocks * size.block_bytes


def test_a_number_of_blocks_wins(prepared_model: Callable[[str], Path]) -> None:
    config = load_config(prepared_model("llama"))
    settings = WorkerSettings(num_blocks=7, kv_cache_memory=10**9)
    assert choose_size(config, settings, torch.float32, CPU, never).blocks == 7


def test_a_pool_without_room_for_one_block(prepared_model: Callable[[str], Path]) -> None:
    config = load_config(prepared_model("llama"))
    with pytest.raises(ModelError, match="One KV block takes 12288 bytes, but only 1000"):
        choose_size(config, WorkerSettings(kv_cache_memory=1000), torch.float32, CPU, never)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_the_pools_own_and_may_lie_in_huge_pages(
    prepared_model: Callable[[str], Path],
) -> None:
    """Most systems give shared memory small pages only."""
    pool = make_pool(load_config(prepared_model("llama")), 5000, 16, torch.float32, CPU)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            low, high = (int(border, 16) for border in name.split("-"))
            inside = low <= pool.data_ptr() < high
            if inside:
                assert values[0] == "rw-p"
        elif inside and name == "VmFlags:":
            assert "hg" in values
            return
    raise AssertionError("the pool is nowhere")


def test_memory_is_found_aside_and_keeps_what_was_written(
    prepared_model: Callable[[str], Path],
) -> None:
    config = load_config(prepared_model("llama"))
    pool = make_pool(config, 5000, 16, torch.float32, CPU)
    before = resident()
    pool[:, :, 17] = 3.0
    populate(pool).join()
    assert resident() - before > 0.9 * pool.nbytes
    assert (pool[:, :, 17] == 3.0).all()
    pool[:, :, 17] = 0.0
    assert not pool.any()


class Runtime:
    """CUDA's, as far as host memory goes: {address: bytes} are pinned."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_the_host_pool_of_a_gpu_is_pinned_as_it_is_and_while_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pool = torch.empty(3, 2, 70, 2, 16, 32, dtype=torch.bfloat16, device="meta")
    host = make_host_pool(pool, pool.nbytes)
    assert host is not None
    assert (host.shape, host.dtype, host.device) == (pool.shape, pool.dtype, CPU)
    assert runtime.pinned == {host.data_ptr(): pool.nbytes}
    assert host[:, :, 5].is_contiguous()
    assert not host.any()
    block = host[:, :, 7]
    del host
    assert runtime.pinned
    del block
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(status=2))
    pool = torch.empty(3, 2, 70, 2, 16, 32, device="meta")
    with pytest.raises(ModelError, match=r"--swap-space cannot be pinned \(CUDA's error 2\)"):
        make_host_pool(pool, pool.nbytes)


@pytest.mark.parametrize("blocks", [10**13, 2**62])
def test_memory_that_is_not_there_is_said(
    blocks: int, prepared_model: Callable[[str], Path]
) -> None:
    config = load_config(prepared_model("llama"))
    pool = make_pool(config, 4, 16, torch.float32, CPU)
    with pytest.raises(ModelError, match=r"^There is no memory for a pool of .*: ask for less by"):
        make_pool(config, blocks, 16, torch.float32, CPU)
    with pytest.raises(ModelError, match="--swap-space"):
        make_host_pool(pool, blocks * 10**6)
