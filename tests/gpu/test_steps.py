"""A worker's engine from its start on: its steps wait for nothing, and give what a CPU gives."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pagefleet.params import Guide, SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet.wire import Logprobs, unpack_floats
from pagefleet_worker.interface import Engine
from pagefleet_worker.loading import load_engine
from pagefleet_worker.prepare import prepare
from tests.driver import Driver, Stream
from tests.gpu.engines import no_waiting, require_gpu_or_interpreter
from tests.lora import with_adapters
from tests.models import ADAPTED, LATENTS, MIXTURES, make_model

require_gpu_or_interpreter()

GPU = WorkerSettings(
    device="cuda",
    dtype="float32",
    num_blocks=24,
    max_num_seqs=4,
    max_num_batched_tokens=18,
    max_model_len=32,
    swap_space=1 << 18,
)
"""A step may be a graph, or have a row that is too long for one."""
CPU = replace(GPU, device="cpu")

CHANGES: dict[str, dict[str, Any]] = {
    "fp8": {"kv_cache_dtype": "fp8"},
    "invariant": {"batch_invariant": True},
    "eager": {"enforce_eager": True},
    "bfloat16": {"dtype": "bfloat16"},
}
"""Settings of other engines."""


def all_kinds_of_params(generator: random.Random) -> list[SamplingParams]:
    """Between them they ask for everything that a sampler does."""

    def params(**asked: Any) -> SamplingParams:
        return SamplingParams(max_tokens=4, seed=generator.randrange(2**64), **asked)

    guide = Guide("start: /[a-f]+/", to_end=False)
    return [
        params(temperature=0.0, guide=guide, logprobs=0),
        params(top_k=9, top_p=0.8, min_p=0.01, repetition_penalty=1.3, logprobs=3),
        params(logit_bias={3: 1.0}, bad_words=((5,), (1, 2)), min_tokens=2, prompt_logprobs=1),
        params(temperature=0.0, allowed_token_ids=(1, 2, 9), frequency_penalty=0.4),
    ]


def streams_of(engine: Engine, generator: random.Random, adapters: int = 0) -> list[Stream]:
    """Streams of every kind, whose prompts come in chunks, and those of `by_hand`."""
    streams = []
    params = [
        msgspec.structs.replace(each, adapter=number % (adapters + 1))
        for number, each in enumerate(all_kinds_of_params(generator))
    ]
    for first in range(0, len(params), 2):
        prompts = [generator.choices(range(256), k=count) for count in (20, 1)]
        driver = Driver(engine, chunk=17, lookahead=True)
        streams += driver.run(prompts, params[first : first + 2])
    return streams + by_hand(engine, generator)


def by_hand(engine: Engine, generator: random.Random) -> list[Stream]:
    """Two choices that part, one of them with drafts, and an embedding."""
    driver, seed = Driver(engine), generator.randrange(2**64)
    drawn, asked = (generator.choices(range(256), k=count) for count in (7, 5))
    stream = driver.open(drawn, SamplingParams(max_tokens=9, seed=seed), choices=[0, 1])
    prompt = driver.open(asked, SamplingParams(max_tokens=0, seed=0, embedding=8))
    driver.step([stream, prompt]).land()
    twin = driver.fork(stream, 1, stream.output.pop())
    flights = [driver.step([twin])]
    flights.append(driver.step([twin]))
    for flight in flights:
        flight.land()
    twin.output += [*twin.output, 3]  # which are drafts
    twin.asked = len(twin.output)
    driver.step([twin], logits=4).land()
    return [stream, twin, prompt]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared model that is soon interpreted."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return prepare(str(make_model("mistral", folder / "whole", **sizes)), folder / "prepared")


def values(stream: Stream) -> list[float]:
    """All numbers that a stream gives."""
    found: list[Logprobs] = [*stream.logprobs, *(each for _, each in stream.prompt_logprobs)]
    packed = [*(each.chosen for each in found), *([stream.embedding] if stream.embedding else [])]
    return [value for each in packed for value in unpack_floats(each)]


@pytest.mark.parametrize("name", ["mistral", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_no_step_waits_and_streams_are_those_of_a_cpu(
    name: str, folder: Path, prepared_model: Any, device: torch.device, generator: random.Random
) -> None:
    if name in LATENTS:
        folder = prepared_model(name)
    engine, seed = load_engine(folder, GPU, lambda: None), generator.random()
    with no_waiting():
        found = streams_of(engine, random.Random(seed))
    expected = streams_of(load_engine(folder, CPU, lambda: None), random.Random(seed))
    for stream, right in zip(found, expected, strict=True):
        assert (stream.output, stream.errors) == (right.output, right.errors)
        assert values(stream) == pytest.approx(values(right), abs=1e-4)
    assert not any(stream.errors for stream in found)
    assert len(values(found[-1])) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("fp8", "invariant", "eager", "bfloat16", "adapters", "gpt2", "mixtral", "gpt-oss"),
        *("deepseek-v2-lite", "deepseek-v3 invariant"),
    ],
)
def test_no_step_of_any_engine_waits(
    name: str,
    folder: Path,
    small_model: Any,
    prepared_model: Any,
    device: torch.device,
    generator: random.Random,
    tmp_path: Path,
) -> None:
    if name == "adapters":
        folder, _ = with_adapters(small_model("llama"), tmp_path)
    elif name.split()[0] in (*ADAPTED, *MIXTURES, *LATENTS):
        folder = prepared_model(name.split()[0])
    changes = CHANGES.get(name.split()[-1], {})
    engine = load_engine(folder, replace(GPU, **changes), lambda: None)
    with no_waiting():
        found = streams_of(engine, generator, adapters=engine.decoder.adapters)
    assert not any(stream.errors for stream in found)
