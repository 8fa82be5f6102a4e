"""A checkpoint's own numbers on a GPU are the model that a CPU widens."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagefleet.settings import WorkerSettings
from pagefleet.wire import unpack_floats
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model.weights import OWN
from pagefleet_worker.prepare import prepare
from tests.checkpoints import CHECKPOINTS, write_checkpoint
from tests.driver import Driver
from tests.gpu.engines import (
    BLOCKS,
    SLOTS,
    greedy,
    random_prompts,
    require_gpu_or_interpreter,
    triton_engine,
)

require_gpu_or_interpreter()

CPU = WorkerSettings(
    num_blocks=BLOCKS, max_num_seqs=SLOTS, device="cpu", dtype="float32", quantization="none"
)


@pytest.mark.parametrize("name", ["gptq of 32", pytest.param("int8 of 32", marks=pytest.mark.slow)])
def test_streams_are_those_of_a_cpu(
    name: str, small_model: Any, device: torch.device, generator: random.Random, tmp_path: Path
) -> None:
    write_checkpoint(small_model("llama"), tmp_path / "model", CHECKPOINTS[name])
    folder = prepare(str(tmp_path / "model"), tmp_path / "cache")
    prompts = random_prompts(generator, 2, 24)
    params = [greedy(2)] * len(prompts)
    expected = Driver(load_engine(folder, CPU, lambda: None)).run(prompts, params)
    engine = triton_engine(folder, device, quantization=OWN, sizes=(2,))
    assert engine.decoder.bits == [CHECKPOINTS[name].kept]
    found = Driver(engine, chunk=20, lookahead=True).run(prompts, params)
    for stream, right in zip(found, expected, strict=True):
        assert (stream.output, stream.errors) == (right.output, right.errors)
        for piece, same in zip(stream.logprobs, right.logprobs, strict=True):
            values = [unpack_floats(each.top).tolist() for each in (piece, same)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)
