"""The GPU that is not there refuses what a GPU refuses, and what keeps the host waiting."""

import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from pagefleet_kernels.triton_norm import rms_norm
from pagefleet_worker.paging.transfer import Download, fill, to_device
from pagefleet_worker.step.graphs import CudaCapture
from tests.gpu.engines import no_waiting
from tests.gpu.pretended import CompileError, Gpu, MixedError, OnGpu, WaitError, pretended_gpu

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_interpreted.py runs it, interpreted", allow_module_level=True)

CUDA = torch.device("cuda")


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with pretended_gpu() as gpu:
        yield gpu


MIXED: list[Callable[[Tensor, Tensor], object]] = [
    lambda here, host: here + host,
    lambda here, host: torch.cat((here, host)),
    lambda here, host: here.index_select(0, host.long()),
    lambda here, host: here[host.long()],
    lambda here, host: here.index_copy_(0, torch.zeros(4, dtype=torch.int64), here),
    lambda here, host: rms_norm(here[None], host, 1e-5),
]

WAITING: list[Callable[[Tensor, Tensor], object]] = [
    lambda here, host: here[0].item(),
    lambda here, host: here.tolist(),
    lambda here, host: bool(here[0] > 0),
    lambda here, host: here.cpu(),
    lambda here, host: here.nonzero(),
    lambda here, host: torch.where(here > 0),
    lambda here, host: here[here > 0],
    lambda here, host: here[[0, 1]],
    lambda here, host: host.to(CUDA, non_blocking=True),
    lambda here, host: host.pin_memory().to(CUDA),
    lambda here, host: host.pin_memory().to(CUDA, torch.float64, non_blocking=True),
    lambda here, host: here.copy_(host),
    lambda here, host: host.copy_(here, non_blocking=True),
    lambda here, host: torch.tensor([1.0], device=CUDA),
]

FREE: list[Callable[[Tensor, Tensor], object]] = [
    lambda here, host: (here * 2 + host[0]).sum(),
    lambda here, host: host.pin_memory().to(CUDA, non_blocking=True),
    lambda here, host: torch.zeros(2, device=CUDA),
    lambda here, host: here[1:].to(torch.int64).clamp(min=0),
    lambda here, host: torch.where(here > 0, here, 0.0),
    lambda here, host: fill(here, host.numpy()),
]


@pytest.mark.parametrize("work", MIXED)
def test_tensors_of_both_kinds_do_not_mix(gpu: Gpu, work: Callable[..., object]) -> None:
    with pytest.raises(MixedError):
        work(torch.ones(4, device=CUDA), torch.ones(4))


@pytest.mark.parametrize("work", WAITING)
def test_what_waits_is_refused_in_a_step(gpu: Gpu, work: Callable[..., object]) -> None:
    here, host = torch.ones(4, device=CUDA), torch.ones(4)
    work(here, host)
    with no_waiting(), pytest.raises(WaitError):
        work(here, host)


@pytest.mark.parametrize("work", FREE)
def test_what_does_not_wait_is_not(gpu: Gpu, work: Callable[..., object]) -> None:
    here, host = torch.ones(4, device=CUDA), torch.ones(4)
    with no_waiting():
        assert isinstance(work(here, host), OnGpu | None)


def test_nothing_is_copied_without_waiting_and_forgotten(gpu: Gpu) -> None:
    empty = [torch.empty(0).pin_memory() for _ in range(2)]
    with no_waiting():
        assert all(isinstance(each.to(CUDA, non_blocking=True), OnGpu) for each in empty)
    empty.clear()


def test_what_is_copied_to_the_host_is_there_after_its_event(gpu: Gpu) -> None:
    number = random.random()
    download = Download([torch.full((3,), number, device=CUDA)])
    early = [each.clone() for each in download._tensors]
    assert not torch.equal(early[0], torch.full((3,), number))
    assert torch.equal(download.tensors()[0], torch.full((3,), number))


def test_a_graph_follows_its_inputs_and_asks_no_python(gpu: Gpu) -> None:
    values, factor = torch.ones(4, device=CUDA), [2.0]
    replay = CudaCapture()(lambda: rms_norm(values[None] * factor[0], values, 1e-5) + values)
    factor[0] = 3.0
    with no_waiting():
        fill(values, torch.arange(4.0).numpy())
        found = replay()
    expected = torch.arange(4.0)
    scale = (4 * expected.square().mean() + 1e-5).rsqrt()
    assert torch.allclose(found.cpu(), 2 * expected * scale * expected + expected)


def test_a_graph_takes_nothing_from_the_host(gpu: Gpu) -> None:
    with pytest.raises(WaitError):
        CudaCapture()(lambda: to_device([1.0], CUDA))


def test_a_step_compiles_nothing(gpu: Gpu) -> None:
    values = torch.ones(3, 64, device=CUDA)
    rms_norm(values, values[0], 1e-5)
    with no_waiting():
        rms_norm(values[:2], values[1], 1e-5)
        with pytest.raises(CompileError):
            rms_norm(values[:, :32], values[1, :32], 1e-5)
        with pytest.raises(CompileError):
            rms_norm(values, values.flatten()[1:65], 1e-5)  # not aligned
