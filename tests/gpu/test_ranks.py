"""Several GPUs that share a model give what one CPU gives. Needs two of them."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet_worker.group import load_group
from pagefleet_worker.loading import load_engine
from tests.driver import Driver
from tests.gpu.engines import BLOCKS, SLOTS, random_prompts

CPU = WorkerSettings(num_blocks=BLOCKS, max_num_seqs=SLOTS, device="cpu", dtype="float32")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("invariant", [False, True])
def test_streams_are_those_of_a_cpu(
    invariant: bool, prepared_model: Any, generator: random.Random
) -> None:
    """With and without graphs: some steps are longer than those that are captured."""
    folder = prepared_model("llama")
    prompts = random_prompts(generator, 4, 40)
    params = [SamplingParams(max_tokens=8, seed=0, temperature=0)] * len(prompts)
    expected = Driver(load_engine(folder, CPU, lambda: None)).run(prompts, params)
    settings = replace(CPU, device="cuda", tensor_parallel_size=2, batch_invariant=invariant)
    group = load_group(folder, settings, lambda: None, lambda *_: None)
    try:
        found = Driver(group, chunk=20, lookahead=True).run(prompts, params)
    finally:
        group.close()
    assert [each.output for each in found] == [each.output for each in expected]
