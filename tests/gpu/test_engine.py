"""The engine of a GPU, with its kernels, gives what the engine of a CPU gives."""

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet.wire import Logprobs, unpack_floats
from pagefleet_worker.loading import load_engine
from tests.driver import Driver, Stream
from tests.gpu.engines import (
    BLOCKS,
    SLOTS,
    random_prompts,
    require_gpu_or_interpreter,
    triton_engine,
)
from tests.ties import ExpertMargins

require_gpu_or_interpreter()

CPU = WorkerSettings(num_blocks=BLOCKS, max_num_seqs=SLOTS, device="cpu", dtype="float32")


def random_params(generator: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=3,
        seed=generator.randrange(2**64),
        temperature=generator.choice([0.0, 1.0]),
        top_p=generator.choice([1.0, 0.9]),
        frequency_penalty=generator.choice([0.0, 0.5]),
        logprobs=generator.choice([None, 2]),
        prompt_logprobs=generator.choice([None, 1]),
    )


def values(stream: Stream) -> list[float]:
    """All logprobs of a stream."""
    found: list[Logprobs] = [*stream.logprobs, *(each for _, each in stream.prompt_logprobs)]
    return [value for each in found for value in unpack_floats(each.chosen)]


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "gemma3",
                "phi3-partial",
                "olmo3",
                "smollm3",
                "granite",
                "qwen3-moe",
                "gpt-oss",
                "glm4-moe",
            )
        ),
    ],
)
def test_streams_are_those_of_a_cpu(
    name: str,
    small_model: Any,
    prepared_model: Any,
    device: torch.device,
    generator: random.Random,
) -> None:
    folder = prepared_model(name)
    oracle = AutoModelForCausalLM.from_pretrained(small_model(name), dtype=torch.float32)
    of_cpu, clear = load_engine(folder, CPU, lambda: None), False
    while not clear:
        prompts = random_prompts(generator, 2, 24)
        params = [random_params(generator) for _ in prompts]
        on_cpu = Driver(of_cpu).run(prompts, params)
        with torch.inference_mode(), ExpertMargins() as experts:
            for stream in on_cpu:
                oracle(torch.tensor([stream.prompt + stream.output]))
        clear = experts.clear
    engine = triton_engine(folder, device, sizes=(1, 2))
    on_gpu = Driver(engine, chunk=20, lookahead=True).run(prompts, params)
    for found, expected in zip(on_gpu, on_cpu, strict=True):
        assert (found.output, found.errors) == (expected.output, expected.errors)
        assert values(found) == pytest.approx(values(expected), abs=1e-4)
