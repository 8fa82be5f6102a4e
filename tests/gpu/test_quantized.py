"""A checkpoint's own numbers on a GPU are the model that a CPU widens."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagefleet.settings import WorkerSettings
from pagefleet.wire import unpack_floats
from pagefleet_worker.loading import load_engine
from pagefleet_worker.prepare import prepare
from tests.checkpoints import CHECKPOINTS, write_checkpoint, write_mxfp4
from tests.driver import Driver, Stream
from tests.gpu.engines import greedy, no_waiting, random_prompts, require_gpu_or_interpreter
from tests.models import make_model

require_gpu_or_interpreter()

GPU = WorkerSettings(
    device="cuda",
    dtype="float32",
    num_blocks=8,
    max_num_seqs=2,
    max_num_batched_tokens=20,
    max_model_len=32,
)
CPU = replace(GPU, device="cpu", quantization="none")
SIZES = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 64,
}

Write = Callable[[Path, Path], Path]


def quantized(name: str) -> Write:
    return lambda source, target: write_checkpoint(source, target, CHECKPOINTS[name])


CASES: dict[str, tuple[str, dict[str, Any], Write, str]] = {
    "int4": ("llama", {}, quantized("gptq of 32"), "own-int4"),
    "experts, e2m1": ("gpt-oss", {}, write_mxfp4, "own-e2m1"),
    "experts, int4": (
        "qwen3-moe", {"mlp_only_layers": []}, quantized("gptq of 32"), "own-int4"
    ),
    "e4m3": ("llama", {}, quantized("fp8"), "own-e4m3"),
    "int8": ("llama", {}, quantized("int8 of 32"), "own-int8"),
    "experts, int8": ("qwen3-moe", {"mlp_only_layers": []}, quantized("int8"), "own-int8"),
    "experts, e4m3": ("qwen3-moe", {"mlp_only_layers": []}, quantized("float8, rows"), "own-e4m3"),
}  # fmt: skip
"""(model, changes of its config, how it is quantized, what the numerics class says)"""
QUICK = ("experts, e2m1",)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in QUICK else [pytest.mark.slow]) for c in CASES]
)
def test_streams_are_those_of_widened_weights(
    case: str, device: torch.device, generator: random.Random, tmp_path: Path
) -> None:
    model, changes, write, named = CASES[case]
    write(make_model(model, tmp_path / "source", **SIZES | changes), tmp_path / "model")
    folder, prompts = prepare(str(tmp_path / "model"), tmp_path), random_prompts(generator, 2, 20)
    engine = load_engine(folder, GPU, lambda: None)
    assert f" {named} " in engine.facts.numerics
    with no_waiting():
        found = Driver(engine, chunk=17, lookahead=True).run(prompts, [greedy(3)] * 2)
    expected = Driver(load_engine(folder, CPU, lambda: None)).run(prompts, [greedy(3)] * 2)
    for stream, right in zip(found, expected, strict=True):
        assert (stream.output, stream.errors) == (right.output, [])
        assert logprobs(stream) == pytest.approx(logprobs(right), abs=1e-4)


def logprobs(stream: Stream) -> list[float]:
    return [value for each in stream.logprobs for value in unpack_floats(each.top)]
