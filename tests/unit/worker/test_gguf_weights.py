"""Weights of GGUF files: those that transformers saves, in as many bits as the file has."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagefleet.manifest import Weights
from pagefleet_kernels.quantized import Quantized
from pagefleet_worker.model.config import parse_config
from pagefleet_worker.model.weights import INT8, OWN_OR_INT8, Quantization
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.preparation.gguf_model import gguf_model
from tests.gguf_models import write_gguf
from tests.models import COUSINS, MIXTURES, VARIANTS, make_model
from tests.unit.worker.test_weights import MATRICES, assert_equal, config_of, files_of, load


@pytest.mark.parametrize(("name", "head_dim"), [("llama", 64), ("qwen2", 64), ("qwen3", 128)])
def test_gguf(name: str, head_dim: int, tmp_path: Path) -> None:
    folder = make_model(
        name, tmp_path / "hf", hidden_size=256, intermediate_size=512, head_dim=head_dim
    )
    kinds = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1"]
    path = write_gguf(tmp_path / "model.gguf", folder, kinds)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    weights = load(Weights("gguf", (str(path),)), config_of(folder))
    assert_equal(weights, model.state_dict())


UNSAID = {
    "glm": "an architecture of llama.cpp's with a tokenizer and names of its own",
    "mistral": "a window: files of Mistral are those of a Llama",
    "llama-llama3": "its scaling, but the factors that follow from it",
    "qwen2-window": "which layers have a window",
}
"""What of variants is not in files, or not as in their folders."""

SAID: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "smollm3": {"no_rope_layers": None, "num_hidden_layers": 5},
    "qwen3-moe": {"mlp_only_layers": []},
}
"""Changes of variants without which GGUF could not say what they are."""


@pytest.mark.parametrize("name", sorted((VARIANTS | COUSINS | MIXTURES).keys() - UNSAID))
def test_a_file_is_the_model_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    folder = make_model(name, tmp_path / "hf", **SAID.get(name, {}))
    path = write_gguf(tmp_path / "model.gguf", folder, ["F32"])
    expected = config_of(folder)
    config = parse_config(gguf_model(path, "m", own_tokenizer=False).config)
    for field, value in asdict(replace(expected, dtype=None)).items():
        assert asdict(config)[field] == in_float32(value), field
    ours, theirs = load(Weights("gguf", (str(path),)), config), load(files_of(folder), expected)
    for weights, same in [(ours, theirs), *zip(ours.layers, theirs.layers, strict=True)]:
        for field in fields(weights):
            if isinstance(tensor := getattr(weights, field.name), Tensor):
                assert torch.equal(tensor, getattr(same, field.name)), field.name
            else:
                assert field.name == "layers" or not getattr(same, field.name)


def in_float32(value: Any) -> Any:
    """As it is read from a file: GGUF has such numbers, in lists and dictionaries too."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-6)
    if isinstance(value, dict):
        return {key: in_float32(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(in_float32, value))
    return value


@pytest.mark.parametrize(
    ("kinds", "quantization", "kept"),
    [
        (["Q8_0"], INT8, 8),
        (["Q8_0"], OWN_OR_INT8, 8),
        (["Q4_0", "Q4_1"], OWN_OR_INT8, 4),
        (["Q4_0", "Q4_1"], INT8, None),
        (["Q4_1", "Q8_0", "F16"], OWN_OR_INT8, None),
        (["Q5_0"], OWN_OR_INT8, None),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_quantized_gguf(
    name: str, kinds: list[str], quantization: Quantization, kept: int | None, tmp_path: Path
) -> None:
    """Matrices are those of the file where it has all parts in the same bits, else in eight."""
    folder = make_model(name, tmp_path / "hf")
    path = write_gguf(tmp_path / "model.gguf", folder, kinds)
    files, config = Weights("gguf", (str(path),)), config_of(folder)
    plain, quantized = load(files, config), load(files, config, quantization=quantization)
    assert isinstance(quantized.embedding, Tensor)
    pairs = [(plain.head, quantized.head)]
    for layer, same in zip(plain.layers, quantized.layers, strict=True):
        assert torch.equal(layer.attention_norm, same.attention_norm)
        pairs += [(getattr(layer, name), getattr(same, name)) for name in MATRICES]
    for weight, matrix in pairs:
        assert isinstance(weight, Tensor)
        assert isinstance(matrix, Quantized)
        if kept is None:
            assert (matrix.dequantized() - weight).abs().max() <= weight.abs().max() / 250
        else:
            assert matrix.bits == kept
            assert torch.equal(matrix.dequantized(), weight)


@pytest.mark.parametrize("kinds", [["Q4_K"], ["Q4_K", "Q4_1"]])
def test_quantized_gguf_of_superblocks(kinds: list[str], tmp_path: Path) -> None:
    """Groups of Q4_K lie beside those of simpler blocks; only their scales are rounded."""
    folder = make_model("llama", tmp_path / "hf", hidden_size=256, intermediate_size=512)
    path = write_gguf(tmp_path / "model.gguf", folder, kinds)
    files, config = Weights("gguf", (str(path),)), config_of(folder)
    plain, quantized = load(files, config), load(files, config, quantization=OWN_OR_INT8)
    for layer, same in zip(plain.layers, quantized.layers, strict=True):
        for name in MATRICES:
            weight, matrix = getattr(layer, name), getattr(same, name)
            assert matrix.bits == 4
            assert (matrix.dequantized() - weight).abs().max() <= weight.abs().max() / 1000


def test_gguf_of_an_unreadable_kind(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "hf", hidden_size=256, intermediate_size=512)
    path = write_gguf(tmp_path / "model.gguf", folder, ["TQ2_0"])
    with pytest.raises(ModelError, match="is quantized as TQ2_0; readable are F32"):
        load(Weights("gguf", (str(path),)), config_of(folder))
