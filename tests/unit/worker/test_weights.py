import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagefleet.manifest import Weights
from pagefleet_kernels.quantized import Quantized
from pagefleet_worker.model.config import DecoderConfig, parse_config
from pagefleet_worker.model.weights import (
    INT8,
    PLAIN,
    DecoderWeights,
    Quantization,
    load_weights,
)
from pagefleet_worker.model_files import ModelError

CPU = torch.device("cpu")

PARTS = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "query_norm": ("self_attn.q_norm.weight",),
    "key_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "output_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}

POST_NORMED = {
    "post_attention_norm": ("post_attention_layernorm.weight",),
    "mlp_norm": ("pre_feedforward_layernorm.weight",),
    "post_mlp_norm": ("post_feedforward_layernorm.weight",),
}
FUSED = {"qkv": ("self_attn.qkv_proj.weight",), "gate_up": ("mlp.gate_up_proj.weight",)}
OTHER_NAMES = {"gemma2": POST_NORMED, "gemma3": POST_NORMED, "olmo2": POST_NORMED, "phi3": FUSED}

MATRICES = ("qkv", "output", "gate_up", "down")


def config_of(folder: Path) -> DecoderConfig:
    return parse_config(json.loads((folder / "config.json").read_text()))


def files_of(folder: Path) -> Weights:
    return Weights("safetensors", tuple(str(path) for path in folder.glob("*.safetensors")))


def load(
    files: Weights,
    config: DecoderConfig,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = PLAIN,
) -> DecoderWeights:
    weights = load_weights(files, config, dtype, CPU, lambda loaded, total: None, quantization)
    return replace(weights, layers=tuple(weights.layers))


def assert_equal(weights: DecoderWeights, state: dict[str, Tensor], name: str = "") -> None:
    """Every tensor is made of transformers' by concatenation, and none is left over; norms of
    Gemma are wide, and have 1 added.
    """
    parts, gemma = PARTS | OTHER_NAMES.get(name, {}), name.startswith("gemma")

    def norm(stored: Tensor) -> Tensor:
        return stored + 1 if gemma else stored.to(torch.float32 if name == "olmo2" else dtype)

    used = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    dtype = weights.embedding.dtype
    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"].to(dtype))
    assert torch.equal(weights.norm, norm(state["model.norm.weight"]))
    assert torch.equal(weights.head, state["lm_head.weight"].to(dtype))
    for index, layer in enumerate(weights.layers):
        for field in fields(layer):
            names = [f"model.layers.{index}.{part}" for part in parts.get(field.name, ("none",))]
            found = getattr(layer, field.name)
            assert (found is None) == (names[0] not in state)
            if found is not None:
                expected = torch.cat([state[name] for name in names])
                is_norm = field.name.endswith("norm")
                assert torch.equal(found, norm(expected) if is_norm else expected.to(dtype))
                used.update(names)
    assert used == set(state)


TIED = ("llama-tied", "gemma", "gemma2", "gemma3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["llama-biases", "mistral", "qwen2", "qwen3", "olmo2", "phi3", *TIED]
)
def test_safetensors(name: str, dtype: torch.dtype, small_model: Callable[[str], Path]) -> None:
    folder = small_model(name)
    weights = load(files_of(folder), config_of(folder), dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_equal(weights, model.state_dict(), name)
    assert (weights.head is weights.embedding) == (name in TIED)


def test_a_model_without_a_head(tmp_path: Path, small_model: Callable[[str], Path]) -> None:
    """As Qwen3-Embedding is published: its names lack the prefix."""
    model = AutoModelForCausalLM.from_pretrained(small_model("llama-tied"), dtype=torch.float32)
    model.model.save_pretrained(tmp_path)
    assert "norm.weight" in load_file(tmp_path / "model.safetensors")
    assert_equal(load(files_of(tmp_path), config_of(tmp_path)), model.state_dict())


def test_shards(tmp_path: Path, small_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_model("qwen3"), dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    files = files_of(tmp_path)
    assert len(files.paths) > 2
    assert_equal(load(files, config_of(tmp_path)), model.state_dict())


def test_progress_reaches_the_end(small_model: Callable[[str], Path]) -> None:
    folder = small_model("llama")
    seen: list[tuple[int, int]] = []
    weights = load_weights(
        files_of(folder), config_of(folder), torch.float32, CPU, lambda *at: seen.append(at)
    )
    assert len(list(weights.layers)) == 3
    total = seen[0][1]
    assert seen == [(loaded, total) for loaded in range(1, total + 1)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda weight: None, "lack the tensor 'model.layers.1.mlp.up_proj.weight'"),
        (lambda weight: weight[1:].contiguous(), r"the shape \[95, 64\], but .* \[96, 64\]"),
        (lambda weight: weight.to(torch.float8_e4m3fn), "is torch.float8_e4m3fn"),
    ],
)
def test_files_that_do_not_fit_their_config(
    change: Callable[[Tensor], Tensor | None],
    complaint: str,
    tmp_path: Path,
    small_model: Callable[[str], Path],
) -> None:
    folder = small_model("llama")
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop("model.layers.1.mlp.up_proj.weight"))
    if changed is not None:
        tensors["model.layers.1.mlp.up_proj.weight"] = changed
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=complaint):
        load(files_of(tmp_path), config_of(folder))


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_quantized_safetensors(name: str, small_model: Callable[[str], Path]) -> None:
    folder = small_model(name)
    plain, quantized = (
        load(files_of(folder), config_of(folder), torch.bfloat16, quantization)
        for quantization in (PLAIN, INT8)
    )
    for weights, matrices in [
        (plain, quantized),
        *zip(plain.layers, quantized.layers, strict=True),
    ]:
        for field in fields(matrices):
            matrix = getattr(matrices, field.name)
            if isinstance(matrix, Quantized):
                weight = getattr(weights, field.name).float()
                assert (matrix.dequantized() - weight).abs().max() <= weight.abs().max() / 120
    assert isinstance(quantized.head, Quantized)
