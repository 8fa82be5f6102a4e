"""What is decided, and what is said, before an engine stands."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagefleet.settings import WorkerSettings
from pagefleet_worker import model_loading
from pagefleet_worker.loading import Limits, load_engine
from pagefleet_worker.model.config import load_config
from pagefleet_worker.model.weights import PLAIN
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.model_loading import choose_dtype, choose_quantization


@pytest.mark.parametrize(
    ("name", "saved", "chosen"),
    [
        ("auto", "float16", torch.float16),
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float32", torch.bfloat16),
        ("auto", None, torch.bfloat16),
        ("float32", "bfloat16", torch.float32),
    ],
)
def test_a_gpu_computes_in_16_bits_unless_told_otherwise(
    name: str, saved: str | None, chosen: torch.dtype, prepared_model: Callable[[str], Path]
) -> None:
    config = replace(load_config(prepared_model("llama")), dtype=saved)
    assert choose_dtype(name, config, torch.device("cuda")) is chosen


@pytest.mark.parametrize(
    ("device", "wanted", "tokens"),
    [("cpu", None, 1024), ("cuda", None, 2048), ("cuda:1", None, 2048), ("cuda", 64, 64)],
)
def test_a_gpu_takes_larger_steps_unless_told_otherwise(
    device: str, wanted: int | None, tokens: int
) -> None:
    settings = WorkerSettings(max_num_batched_tokens=wanted)
    assert Limits.of(settings, torch.device(device), 100).tokens == tokens


def test_a_lack_of_memory_is_told_with_what_to_do(
    prepared_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20 GiB.")

    monkeypatch.setattr(model_loading, "load_weights", fill)
    with pytest.raises(ModelError, match=r"lower --gpu-memory-utilization.* allocate 20 GiB"):
        load_engine(prepared_model("llama"), WorkerSettings(device="cpu"), lambda: None)


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("tpu", "There is no device 'tpu'"),
        ("cuda:x", "There is no device 'cuda:x'"),
        ("cuda:0,cuda:1", "There is no device 'cuda:0,cuda:1'"),
        ("cuda:2", "There is no cuda:2: torch sees 2 CUDA devices"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    device: str,
    sentence: str,
    prepared_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ModelError, match=sentence):
        load_engine(prepared_model("llama"), WorkerSettings(device=device), lambda: None)


def test_a_gpu_that_is_too_old_is_refused(
    prepared_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(ModelError, match="Tesla T4 is too old"):
        load_engine(prepared_model("llama"), WorkerSettings(device="cuda"), lambda: None)


def test_what_no_kernel_multiplies_is_widened_or_refused() -> None:
    unable = "a CPU with --dtype float16"
    assert choose_quantization("auto", "safetensors", unable) == PLAIN
    with pytest.raises(ModelError, match="no products for --quantization int8 on a CPU with --d"):
        choose_quantization("int8", "safetensors", unable)
