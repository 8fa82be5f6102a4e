"""A rehearsal runs on engines of all sizes, leaves nothing behind, and nothing to compile."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from benchmarks.triton_resources import MACHINES, NotingDriver
from pagefleet.manifest import Manifest
from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet_kernels.dispatch import Kernels, select
from pagefleet_worker.interface import EngineFacts
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model.config import load_config
from pagefleet_worker.model.decoder import Decoder
from pagefleet_worker.model.weights import load_weights
from pagefleet_worker.paging.pools import make_pool
from pagefleet_worker.step.engine import TorchEngine
from pagefleet_worker.step.graphs import graph_sizes
from pagefleet_worker.step.rehearsal import rehearse
from tests.driver import Driver
from tests.gpu_twin import as_on_gpu

SETTINGS = WorkerSettings(num_blocks=40, max_num_seqs=24, device="cpu", dtype="float32")


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 2, "max_num_batched_tokens": 7},
        {"num_blocks": 1},
        {"max_model_len": 7},
    ],
)
def test_a_stream_is_the_same_after_it(limits, prepared_model):
    engine = load_engine(prepared_model("llama"), replace(SETTINGS, **limits), lambda: None)
    params = SamplingParams(max_tokens=3, seed=random.randrange(2**32), logprobs=2)
    prompt = [1, 2, 3, 4]
    expected = Driver(engine).run([prompt], [params])[0]
    twin = as_on_gpu(engine, [1])
    rehearse(twin)
    found = Driver(twin).run([prompt], [params])[0]
    assert (found.output, found.logprobs) == (expected.output, expected.logprobs)
    assert not found.errors


MACHINE = MACHINES["cuda:90"]
LENGTH, STEP, SLOTS, BLOCKS = 2400, 400, 40, 400


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What a GPU would have compiled; launches of kernels do nothing."""
    found: set[str] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found.add(f"{fn.jit_function.__name__} {key}")
        return True

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    monkeypatch.setattr(triton.runtime.driver, "_active", NotingDriver(MACHINE.target))
    return found


def kernels_of_a_gpu(*, invariant: bool) -> Kernels:
    """They choose token 0, from parameters that lie anywhere."""
    kernels = select(torch.device("cuda"), invariant=invariant)
    sample = kernels.sample
    assert sample is not None

    def anywhere(column: Tensor) -> Tensor:
        return torch.cat((column[:1], column))[1:] if random.random() < 0.5 else column

    return replace(
        kernels,
        attention=partial(kernels.attention, chip=MACHINE.chip),
        sample=lambda logits, *columns: sample(logits, *map(anywhere, columns)).zero_(),
    )


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_nothing_is_left_to_compile(
    eager: bool,
    invariant: bool,
    compiled: set[str],
    prepared_model: Callable[[str], Path],
) -> None:
    folder, cpu = prepared_model("mistral"), torch.device("cpu")
    manifest, config = Manifest.load(folder), load_config(folder)
    weights = load_weights(manifest.weights, config, torch.bfloat16, cpu, lambda *_: None)
    decoder = Decoder(config, weights, kernels_of_a_gpu(invariant=invariant), LENGTH, lambda: None)
    facts = EngineFacts("model", "class", 16, BLOCKS, SLOTS, LENGTH, STEP, config.vocab_size)
    pool = make_pool(config, BLOCKS, 16, torch.bfloat16, cpu)
    engine = TorchEngine(facts, decoder, decoder.kernels, pool)
    engine = as_on_gpu(engine, None if eager else graph_sizes(SLOTS))
    rehearse(engine)
    before = set(compiled)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    random.seed(seed)
    for rows in (1, 1, random.randint(2, 7), random.randint(8, SLOTS)):
        chunk = random.randint(1, STEP // rows)
        longest = min(10 * chunk, BLOCKS // rows * 16 - 20, LENGTH - 20)
        prompts = [[1] * random.randint(1, longest) for _ in range(rows)]
        params = [
            SamplingParams(max_tokens=2, seed=0, logprobs=random.choice([None, 2])) for _ in prompts
        ]
        Driver(engine, chunk=chunk, lookahead=True).run(prompts, params)
    assert compiled == before
