"""What `benchmarks.gpu_check` times, at sizes that an interpreter bears: every part, to its end."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks import gpu_rates, gpu_step
from benchmarks.gpu_check import RATES, SLOW, measure
from pagefleet_kernels.quantized import Kind
from tests.gpu.engines import require_gpu_or_interpreter

require_gpu_or_interpreter()

SMALL = {
    "BATCHES": (1, 2),
    "CONTEXTS": (64, 128),
    "PREFILLS": ((2, 0, 16), (1, 16, 16)),
    "MATRICES": ((64, 128),),
    "PRODUCT_ROWS": (1, 17),
    "EXPERTS": ((None, 3, 1, 64, 32), (Kind.E2M1, 3, 1, 64, 32)),
    "EXPERT_ROWS": (1, 17),
    "SAMPLED_ROWS": 2,
    "VOCABULARY": 40,
    "COLD_BYTES": 1 << 14,
    "REPLAYS": 1,
    "HEADS": 4,
    "KV_HEADS": 2,
    "HEAD_SIZE": 32,
    "TOKEN_NUMBERS": 128,
}
LINES = {"decode": 5, "decode, fp8": 4, "prefill": 3, "products": 6, "experts": 4, "sample": 4}
QUICK = ("products", "step, graphs on")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(gpu_rates, name, value)
    monkeypatch.setattr(gpu_rates, "seconds_of", partial(gpu_rates.seconds_of, repeats=1))
    monkeypatch.setattr(gpu_rates, "copy_rate", partial(gpu_rates.copy_rate, nbytes=1 << 16))
    monkeypatch.setattr(gpu_rates, "product_rate", partial(gpu_rates.product_rate, size=64))
    config = replace(
        gpu_step.CONFIG,
        vocab_size=40, hidden_size=64, intermediate_size=96, layers=1, heads=4, kv_heads=2,
        head_dim=32, max_positions=256, windows=(0,), ropes=gpu_step.CONFIG.ropes[:1],
    )  # fmt: skip
    monkeypatch.setattr(gpu_step, "CONFIG", config)
    monkeypatch.setattr(gpu_step, "CASES", ((1, 32), (2, 63)))
    monkeypatch.setattr(gpu_step, "STEPS", 2)
    monkeypatch.setattr(gpu_step, "WARM_UP", 2)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=[] if part in QUICK else [pytest.mark.slow])
        for part in (*RATES, *SLOW)
    ],
)
def test_every_part_comes_to_its_end(small: None, device: torch.device, part: str) -> None:
    lines = list(measure(device, part))
    assert all(right for right, _ in lines)
    assert len(lines) == LINES.get(part, 2)
    assert not any("not measured" in line for _, line in lines)
