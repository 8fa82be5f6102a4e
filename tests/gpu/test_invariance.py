"""With `--batch-invariant` a stream has the same bits alone, in any company, and in any chunks."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagefleet_worker.step.selftest import is_exact
from tests.driver import Driver
from tests.gpu.engines import (
    BLOCK_SIZE,
    greedy,
    random_prompts,
    require_gpu_or_interpreter,
    seen,
    triton_decoder,
    triton_engine,
)

require_gpu_or_interpreter()


def test_a_stream_has_the_same_bits_in_every_company(
    prepared_model: Any, device: torch.device, generator: random.Random
) -> None:
    engine = triton_engine(prepared_model("qwen3"), device, invariant=True, sizes=(1, 4))
    prompts, params = random_prompts(generator, 2, 20), [greedy(3)] * 2
    alone = [
        seen(Driver(engine).run([prompt], [each])[0])
        for prompt, each in zip(prompts, params, strict=True)
    ]
    driver = Driver(engine, chunk=generator.randint(5, 30), lookahead=True, seed=1)
    assert [seen(stream) for stream in driver.run(prompts, params)] == alone


@pytest.mark.slow
def test_the_self_test_finds_it_exact(prepared_model: Any, device: torch.device) -> None:
    folder: Path = prepared_model("llama")
    assert is_exact(triton_decoder(folder, device, invariant=True), BLOCK_SIZE, 20)
