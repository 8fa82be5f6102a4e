import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pagefleet.manifest import Weights
from pagefleet_kernels.quantized import Quantized
from pagefleet_worker.model.config import DecoderConfig, parse_config
from pagefleet_worker.model.weights import (
    INT8,
    OWN_OR_INT8,
    PLAIN,
    DecoderWeights,
    Quantization,
    load_weights,
)
from pagefleet_worker.model_files import ModelError
from tests.models import make_model

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

OTHER_ARCHITECTURES = {"gemma3_text": "gemma3", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
"""In GGUF."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["llama-biases", "llama-tied", "mistral", "qwen2", "qwen3", "gemma2", "olmo2", "phi3"]
)
def test_safetensors(name: str, dtype: torch.dtype, small_model: Callable[[str], Path]) -> None:
    folder = small_model(name)
    weights = load(files_of(folder), config_of(folder), dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_equal(weights, model.state_dict(), name)
    assert (weights.head is weights.embedding) == (name in ("llama-tied", "gemma2"))


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


def write_gguf(path: Path, folder: Path, kinds: list[str]) -> Path:
    """The model in `folder` as llama.cpp's converter would write it, its matrices in turn as one
    of `kinds`. The K kinds, which `gguf` cannot quantize to, get random blocks.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    kind = OTHER_ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", 64))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(getattr(config, "head_dim", 64))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_vocab_size(config.vocab_size)
    if (experts := getattr(config, "num_local_experts", 0)) > 0:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if inner := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(inner)
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    random = np.random.default_rng(0)
    for index, (name, tensor) in enumerate(apart(model.state_dict()).items()):
        values = tensor.numpy()
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        stored_as = kinds[index % len(kinds)] if values.ndim > 1 else "F32"
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            assert name == "lm_head.weight"  # Gemma's is the embedding, and is not written
            continue
        number = gguf.GGMLQuantizationType[stored_as]
        writer.add_tensor(stored, quantized(values, stored_as, random), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """With gates and values of experts apart, as GGUF has them, by names of weights."""
    tensors = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            gates, values = tensor.chunk(2, dim=1)
            tensors[name.replace("gate_up", "gate") + ".weight"] = gates
            tensors[name.replace("gate_up", "up") + ".weight"] = values
        else:
            tensors[name + ".weight" * name.endswith("experts.down_proj")] = tensor
    return tensors


def quantized(values: np.ndarray, kind: str, random: np.random.Generator) -> np.ndarray:
    number = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        return np.asarray(quantize(values, number))
    elements, size = gguf.GGML_QUANT_SIZES[number]
    blocks = random.integers(0, 256, (values.size // elements, size), dtype=np.uint8)
    scales = random.uniform(-0.01, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind == "Q6_K":  # one scale ends the block; in the others two lead it
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(values.shape[0], -1)


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


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "phi3"])
def test_gguf_with_other_names(
    name: str, tmp_path: Path, small_model: Callable[[str], Path]
) -> None:
    folder = small_model(name)
    path = write_gguf(tmp_path / "model.gguf", folder, ["F32"])
    weights = load(Weights("gguf", (str(path),)), config_of(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_equal(weights, model.state_dict(), name)


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


def test_gguf_of_an_unreadable_kind(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "hf")
    path = write_gguf(tmp_path / "model.gguf", folder, ["MXFP4"])
    with pytest.raises(ModelError, match="is quantized as MXFP4; readable are F32"):
        load(Weights("gguf", (str(path),)), config_of(folder))
