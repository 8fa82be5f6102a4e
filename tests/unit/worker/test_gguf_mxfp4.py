"""gpt-oss from GGUF files, with experts in floats of four bits: against transformers' model of what
these stand for.
"""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagefleet.manifest import Weights
from pagefleet_kernels.quantized import Quantized
from pagefleet_worker.model.weights import OWN, PLAIN
from pagefleet_worker.prepare import prepare
from tests.checkpoints import write_mxfp4
from tests.gguf_models import write_gguf
from tests.models import VOCAB_SIZE, make_model
from tests.unit.worker.test_quantized_engine import (
    MOSTLY,
    assert_chosen,
    assert_mostly_chosen,
    served,
    streams_of,
)
from tests.unit.worker.test_weights import config_of, load

EXPERTS = ("gate_up", "down")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the numbers of the file stand for."""
    source = make_model("gpt-oss", tmp_path_factory.mktemp("gpt-oss") / "source")
    return write_mxfp4(source, source.with_name("model"))


@pytest.fixture(scope="module")
def path(twin: Path) -> Path:
    return write_gguf(twin.with_name("model.gguf"), twin, ["F32"], experts="MXFP4")


def test_experts_keep_their_four_bits(twin: Path, path: Path) -> None:
    """And stand for the same, as all else does."""
    config, files = config_of(twin), Weights("gguf", (str(path),))
    meant = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).state_dict()
    widened = load(files, config, quantization=PLAIN)
    own = load(files, config, quantization=OWN)
    for index, (layer, plain) in enumerate(zip(own.layers, widened.layers, strict=True)):
        experts = f"model.layers.{index}.mlp.experts"
        gate_up = meant[f"{experts}.gate_up_proj"].mT
        gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1)
        down = meant[f"{experts}.down_proj"].mT
        for field, tensor in zip(EXPERTS, (gate_up, down), strict=True):
            matrix = getattr(layer, field)
            assert isinstance(matrix, Quantized)
            assert matrix.bits == 4
            assert torch.equal(matrix.dequantized(), tensor.flatten(0, 1))
            assert torch.equal(getattr(plain, field), tensor.flatten(0, 1))
        assert isinstance(layer.qkv, Tensor)
        assert torch.equal(layer.sinks, meant[f"model.layers.{index}.self_attn.sinks"])


def test_tokens_are_transformers(twin: Path, path: Path, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    oracle = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    prepared = prepare(str(path), tmp_path, tokenizer=str(twin))
    prompts = [generator.choices(range(VOCAB_SIZE), k=generator.randint(1, 60)) for _ in range(4)]
    for stream in streams_of(served(prepared), prompts):
        assert_chosen(oracle, stream, 1e-4)
    own = served(prepared, quantization="gguf")
    assert "float32 gguf " in own.facts.numerics
    assert_mostly_chosen(oracle, streams_of(own, prompts), MOSTLY)
