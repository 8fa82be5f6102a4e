"""What only a GPU can show: its own graphs, and what it is like to lose it."""

import multiprocessing
import os
import random
from typing import Any

import pytest
import torch

from pagefleet_worker.interface import DeviceLostError
from pagefleet_worker.paging.transfer import Download, telling_loss
from tests.driver import Driver
from tests.gpu.engines import greedy, random_prompts, seen, triton_engine

if not torch.cuda.is_available():
    pytest.skip("no GPU: graphs and streams are there only", allow_module_level=True)


def test_graphs_compute_what_kernels_compute_one_by_one(
    prepared_model: Any, device: torch.device, generator: random.Random
) -> None:
    folder, prompts = prepared_model("qwen3"), random_prompts(generator, 5)
    params = [greedy(12)] * 5
    one_by_one = Driver(triton_engine(folder, device, invariant=True), lookahead=True)
    expected = [seen(stream) for stream in one_by_one.run(prompts, params)]
    replayed = Driver(triton_engine(folder, device, invariant=True, sizes=(1, 2, 4, 8)))
    replayed.lookahead = True
    assert [seen(stream) for stream in replayed.run(prompts, params)] == expected


def lose_the_device() -> None:
    device = torch.device("cuda")
    numbers, beyond = torch.zeros(4, device=device), torch.tensor([9], device=device)
    with pytest.raises(DeviceLostError) as loss, telling_loss(device):
        Download([numbers[beyond]]).tensors()
    assert loss.tb  # which holds what the device used
    os._exit(3)  # before anything is given back, as a worker does


def test_an_error_of_a_kernel_loses_the_device() -> None:
    process = multiprocessing.get_context("spawn").Process(target=lose_the_device)
    process.start()
    process.join()
    assert process.exitcode == 3


def test_a_lack_of_memory_does_not(device: torch.device) -> None:
    with pytest.raises(torch.OutOfMemoryError), telling_loss(device):
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
