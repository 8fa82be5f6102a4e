"""Engines of quantized checkpoints against transformers' model of the weights they stand for."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagefleet.params import SamplingParams
from pagefleet.settings import WorkerSettings
from pagefleet.wire import unpack_floats
from pagefleet_worker.checkpoints.compressed import CompressedTensors
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model.config import load_config
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.prepare import prepare
from pagefleet_worker.step.engine import TorchEngine
from tests.checkpoints import CHECKPOINTS, Checkpoint, round_activations, write_checkpoint
from tests.driver import Driver, Stream
from tests.models import MIXTURES, VOCAB_SIZE, make_model

SETTINGS = WorkerSettings(num_blocks=60, max_num_seqs=8, device="cpu", dtype="float32")
TOKENS = 8
ROUNDING = 1e-4
"""Of a logprob in float32."""

DRIFT = 0.15
"""Of a logprob, by activations that lie so near the middle of two numbers of 8 bits that one model
rounds them up and the other down: 0.07 was the most in 960 streams.
"""

MOSTLY = 0.1
"""Of most logprobs of a mixture of experts, by the same."""


@pytest.fixture
def generator() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def served(folder: Path, **changes: object) -> TorchEngine:
    return load_engine(folder, replace(SETTINGS, **changes), lambda: None)


def streams_of(engine: TorchEngine, prompts: list[list[int]]) -> list[Stream]:
    greedy = SamplingParams(max_tokens=TOKENS, seed=0, temperature=0, logprobs=0)
    streams = Driver(engine, chunk=16).run(prompts, [greedy] * len(prompts))
    assert not any(stream.errors for stream in streams)
    return streams


@torch.inference_mode()
def distances(oracle: torch.nn.Module, stream: Stream) -> tuple[Tensor, Tensor]:
    """How much likelier than each token the oracle's best is, and how far off its logprob is."""
    logits = oracle(torch.tensor([stream.prompt + stream.output])).logits[0]
    expected = logits[len(stream.prompt) - 1 : -1].log_softmax(-1)
    chosen = expected.gather(1, torch.tensor(stream.output).unsqueeze(1))[:, 0]
    found = torch.tensor([unpack_floats(each.chosen)[0] for each in stream.logprobs])
    return expected.amax(-1) - chosen, (found - chosen).abs()


def assert_chosen(oracle: torch.nn.Module, stream: Stream, near: float) -> None:
    """Each token is one of the oracle's that are within `near` of its best, and as likely."""
    behind, off = distances(oracle, stream)
    assert (behind <= near).all()
    assert (off <= near).all()


def assert_mostly_chosen(oracle: torch.nn.Module, streams: list[Stream], near: float) -> None:
    """Most tokens are: activations in 8 bits let a row now and then take another expert."""
    behind, off = map(torch.cat, zip(*(distances(oracle, each) for each in streams), strict=True))
    assert behind.median() <= near
    assert off.median() <= near


@pytest.mark.parametrize(
    ("model", "name", "numerics"),
    [
        ("llama", "gptq of 32, asymmetric", "float32 own-int4 "),
        ("qwen2", "awq", "float32 own-int4 "),
        ("qwen3", "packed", "float32 own-int4 "),
        ("mistral", "int8", "float32 own-int8 "),
        ("qwen3", "fp8", "float32 block-"),
        ("gemma", "packed", "float32 own-int4 "),
        ("phi3-partial", "awq", "float32 own-int4 "),
        ("qwen3-moe", "packed", "float32 own-int4 "),
    ],
)
def test_tokens_are_transformers(
    model: str, name: str, numerics: str, tmp_path: Path, generator: random.Random
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    if model in MIXTURES:
        sizes["moe_intermediate_size"] = 128
    source = make_model(model, tmp_path / "source", **sizes)
    twin = write_checkpoint(source, tmp_path / "model", CHECKPOINTS[name])
    oracle = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    folder = prepare(str(tmp_path / "model"), tmp_path / "cache")
    prompts = [generator.choices(range(VOCAB_SIZE), k=generator.randint(1, 40)) for _ in range(4)]
    engine = served(folder, quantization="none")
    assert "float32 block-" in engine.facts.numerics
    for stream in streams_of(engine, prompts):
        assert_chosen(oracle, stream, ROUNDING)
    own = served(folder)
    assert numerics in own.facts.numerics
    assert "inexact" not in own.facts.numerics
    if model in MIXTURES:
        assert_mostly_chosen(oracle, streams_of(own, prompts), MOSTLY)
        return
    if CHECKPOINTS[name].kept is not None:
        round_activations(oracle)
    for stream in streams_of(own, prompts):
        assert_chosen(oracle, stream, ROUNDING if CHECKPOINTS[name].kept is None else DRIFT)


def test_what_is_unknown_is_refused_when_it_is_prepared(
    small_model: Callable[[str], Path], tmp_path: Path
) -> None:
    unknown = Checkpoint({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda w: ({}, w))
    write_checkpoint(small_model("llama"), tmp_path / "model", unknown)
    with pytest.raises(ModelError, match="quantized by 'bitsandbytes', which is not supported"):
        prepare(str(tmp_path / "model"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "file", "config"),
    [
        ("gptq of 32", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("awq of 32", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
    ],
)
def test_a_config_in_a_file_of_its_own(
    name: str,
    file: str,
    config: dict[str, object],
    small_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """As AutoGPTQ and AutoAWQ wrote it before transformers read it."""
    write_checkpoint(small_model("llama"), tmp_path / "model", CHECKPOINTS[name])
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(values))
    (tmp_path / "model" / file).write_text(json.dumps(config))
    folder = prepare(str(tmp_path / "model"), tmp_path / "cache")
    assert "own-int4" in served(folder).facts.numerics
    widened = served(folder, dtype="float16").facts.numerics
    assert "float16 block-" in widened  # a CPU has no such products


def test_a_config_by_its_former_name(small_model: Callable[[str], Path], tmp_path: Path) -> None:
    """As early releases of compressed-tensors wrote it."""
    write_checkpoint(small_model("llama"), tmp_path / "model", CHECKPOINTS["int8 of 32"])
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    former = values.pop("quantization_config")
    del former["quant_method"]
    content = json.dumps(values | {"compression_config": former})
    (tmp_path / "model" / "config.json").write_text(content)
    folder = prepare(str(tmp_path / "model"), tmp_path / "cache")
    assert isinstance(load_config(folder).format, CompressedTensors)
