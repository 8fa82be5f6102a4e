"""gpt-oss as it is published, with experts in floats of four bits: against transformers' model of
what these stand for.
"""

import random
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagefleet_kernels.quantized import GROUP, Kind, Quantized
from pagefleet_worker.checkpoints.stored_matrix import Micro
from pagefleet_worker.model.shares import Share
from pagefleet_worker.model.weights import INT8, OWN, PLAIN
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.prepare import prepare
from tests.checkpoints import write_mxfp4
from tests.models import VOCAB_SIZE, make_model
from tests.unit.worker.test_checkpoints import load
from tests.unit.worker.test_decoder import LONGEST, Model
from tests.unit.worker.test_quantized_engine import (
    MOSTLY,
    assert_chosen,
    assert_mostly_chosen,
    served,
    streams_of,
)

FIELDS = ("gate_up", "down")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = make_model("gpt-oss", tmp_path_factory.mktemp("gpt-oss") / "source")
    write_mxfp4(source, source.with_name("model"))
    return source.with_name("model")


@pytest.fixture(scope="module")
def twin(folder: Path) -> Path:
    return folder.with_name("model-widened")


@pytest.fixture
def generator() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def test_numbers_are_what_transformers_reads(folder: Path, twin: Path) -> None:
    _, meant = load(twin, PLAIN)
    _, widened = load(folder, PLAIN)
    weights, own = load(folder, OWN)
    assert weights.kinds == {Kind.E2M1}
    for layer, plain, right in zip(own, widened, meant, strict=True):
        for name, tensor in vars(right).items():
            found = getattr(layer, name)
            if name in FIELDS:
                assert torch.equal(getattr(plain, name), tensor)
                assert isinstance(found, Quantized)
                assert found.floats
                assert torch.equal(found.dequantized(), tensor)
            else:
                assert found is tensor is None or torch.equal(found, tensor)


def test_ranks_have_parts_of_them(folder: Path) -> None:
    _, whole = load(folder, OWN)
    halves = [load(folder, OWN, share=Share(rank, 2))[1] for rank in range(2)]
    for layer, *parts in zip(whole, *halves, strict=True):
        gates = [part.gate_up.dequantized().view(6, 2, 48, 64) for part in parts]
        together = torch.cat(gates, dim=2).view(-1, 64)
        assert torch.equal(together, layer.gate_up.dequantized())
        downs = [part.down for part in parts]  # their groups are cut: 48 is no multiple of 32
        assert torch.equal(torch.cat(downs, dim=1), layer.down.dequantized())


def test_all_is_in_eight_bits_where_that_is_asked_for(folder: Path, twin: Path) -> None:
    _, meant = load(twin, PLAIN)
    weights, layers = load(folder, INT8)
    assert weights.kinds == {Kind.INT8}
    for layer, right in zip(layers, meant, strict=True):
        for field in FIELDS:
            weight = getattr(right, field)
            off = (getattr(layer, field).dequantized() - weight).abs()
            assert off.max() <= weight.abs().max() / 250


@pytest.mark.parametrize(
    ("exponent", "held"), [(127, True), (104, True), (103, False), (144, False)]
)
def test_scales_are_those_of_float16_or_all_is_widened(exponent: int, held: bool) -> None:
    numbers = torch.randint(1, 8, (4, GROUP), dtype=torch.uint8)
    exponents = torch.full((4, 1), 120, dtype=torch.uint8)
    exponents[2] = exponent
    found = Micro(numbers, exponents).quantized()
    assert (found is not None) == held
    numbers[2] = 8  # -0: its scale says nothing
    micro = Micro(numbers, exponents)
    assert torch.equal(micro.quantized().dequantized(), micro.dequantized())


def test_tokens_are_transformers(
    folder: Path, twin: Path, tmp_path: Path, generator: random.Random
) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    prepared = prepare(str(folder), tmp_path)
    prompts = [generator.choices(range(VOCAB_SIZE), k=generator.randint(1, 60)) for _ in range(4)]
    for stream in streams_of(served(prepared, quantization="none"), prompts):
        assert_chosen(oracle, stream, 1e-4)
    own = served(prepared)
    assert "float32 own-e2m1 " in own.facts.numerics
    assert "inexact" not in own.facts.numerics
    assert_mostly_chosen(oracle, streams_of(own, prompts), MOSTLY)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_bits_depend_neither_on_the_batch_nor_on_chunks(
    dtype: torch.dtype, folder: Path, tmp_path: Path, generator: random.Random
) -> None:
    """With attention that is plain beside experts that are not."""
    model = Model(prepare(str(folder), tmp_path), dtype, OWN)
    lengths = [generator.randint(1, LONGEST) for _ in range(4)]
    prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]

    def logits(chunk: int) -> list[Tensor]:
        return model.logits(prompts, lambda: generator.randint(1, chunk), generator)

    alone = [model.logits([prompt], lambda: LONGEST, generator)[0] for prompt in prompts]
    schedules = [logits(1), logits(40)]
    assert model.decoder._stack is not None
    with patch.object(model.decoder, "hidden", model.decoder.hidden_by_layer):
        schedules.append(logits(40))
    for together in schedules:
        for found, expected in zip(together, alone, strict=True):
            assert torch.equal(found, expected)


def test_blocks_without_scales_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(
        ModelError, match=r"lack the tensor .*1\.mlp\.experts\.0\.down_proj\.scales"
    ):
        load(tmp_path, OWN)
