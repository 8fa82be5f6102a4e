"""What only a GPU can show: captured graphs, and steps that wait for nothing."""

import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pagefleet.params import SamplingParams
from pagefleet_worker.interface import DeviceLostError
from pagefleet_worker.rehearsal import rehearse
from pagefleet_worker.transfer import Download, telling_loss
from tests.driver import Driver
from tests.gpu.engines import greedy, random_prompts, seen, triton_engine

if not torch.cuda.is_available():
    pytest.skip("no GPU: graphs and streams are there only", allow_module_level=True)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fails where torch would make the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


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


def test_steps_are_ordered_without_waiting_for_the_device(
    prepared_model: Any, device: torch.device, generator: random.Random
) -> None:
    engine = triton_engine(prepared_model("llama"), device, sizes=(1, 4))
    rehearse(engine)
    driver = Driver(engine)
    params = [
        SamplingParams(max_tokens=20, seed=1, top_p=0.9, logprobs=3, prompt_logprobs=1),
        SamplingParams(max_tokens=20, seed=2, temperature=0, logit_bias={5: 1.0}),
        SamplingParams(max_tokens=20, seed=3, top_k=5, allowed_token_ids=(1, 2, 3)),
    ]
    prompts = random_prompts(generator, 3)
    streams = [driver.open(*each) for each in zip(prompts, params, strict=True)]
    last = driver.step(streams)
    for _ in range(8):
        with no_waiting():
            flight = driver.step(streams)
        last.land()
        last = flight
    last.land()
    assert not any(stream.errors for stream in streams)
    assert all(len(stream.output) == 9 for stream in streams)


def lose_the_device() -> None:
    device = torch.device("cuda")
    numbers, beyond = torch.zeros(4, device=device), torch.tensor([9], device=device)
    with pytest.raises(DeviceLostError), telling_loss(device):
        Download([numbers[beyond]]).tensors()


def test_an_error_of_a_kernel_loses_the_device() -> None:
    process = multiprocessing.get_context("spawn").Process(target=lose_the_device)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_lack_of_memory_does_not(device: torch.device) -> None:
    with pytest.raises(torch.OutOfMemoryError), telling_loss(device):
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
