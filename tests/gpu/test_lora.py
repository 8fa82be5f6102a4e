"""Streams with LoRA adapters on a GPU's kernels are those of merged models, from graphs too."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pagefleet_worker.step.selftest import is_exact
from tests.driver import Driver
from tests.gpu.engines import (
    BLOCK_SIZE,
    greedy,
    random_prompts,
    require_gpu_or_interpreter,
    triton_decoder,
    triton_engine,
)
from tests.lora import with_adapters

require_gpu_or_interpreter()


def test_streams_are_those_of_merged_models(
    tmp_path: Path, small_model: Any, device: torch.device, generator: random.Random
) -> None:
    folder, oracles = with_adapters(small_model("llama"), tmp_path)
    prompts = random_prompts(generator, 3, 20)
    params = [msgspec.structs.replace(greedy(2), adapter=number) for number in (1, 0, 2)]
    engine = triton_engine(folder, device, sizes=(4,))
    for stream in Driver(engine, lookahead=True).run(prompts, params):
        tokens = torch.tensor([stream.prompt + stream.output])
        with torch.inference_mode():
            logits = oracles[stream.params.adapter](tokens).logits[0]
        scores = logits[len(stream.prompt) - 1 : -1]
        chosen = scores.gather(1, torch.tensor(stream.output)[:, None])[:, 0]
        assert (chosen >= scores.amax(1) - 1e-3).all()


@pytest.mark.slow
def test_the_self_test_finds_it_exact(
    tmp_path: Path, small_model: Any, device: torch.device
) -> None:
    folder, _ = with_adapters(small_model("llama"), tmp_path)
    assert is_exact(triton_decoder(folder, device, invariant=True), BLOCK_SIZE, 20)
