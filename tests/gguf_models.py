"""GGUF files of small models, as llama.cpp's converter would write them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

_ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
"""Those that GGUF calls otherwise than transformers."""

_INTERLEAVED = ("llama", "smollm3", "granite")
"""Those whose queries and keys are turned in neighbouring dimensions."""

_SLIDING = "sliding_attention"


def write_gguf(
    path: Path, folder: Path, kinds: list[str], *, experts: str | None = None, split: int = 0
) -> Path:
    """The model in `folder`, its matrices in turn as one of `kinds`, those of experts as `experts`.
    The K kinds, which `gguf` cannot quantize to, get random blocks. With `split` the file is
    several, of so many tensors each, of which the first is returned.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    kind = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, kind, split_max_tensors=split)
    _add_metadata(writer, config, kind)
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[kind]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    random = np.random.default_rng(0)
    for index, (name, tensor) in enumerate(_apart(model.state_dict()).items()):
        values = tensor.numpy()
        if kind in _INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        values = values.squeeze()
        name = name.replace("correction_bias", "correction.bias")
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        assert stored is not None
        stored_as = kinds[index % len(kinds)]
        if values.ndim == 3 and experts is not None:
            stored_as = experts
        elif values.ndim < 2 or stored.endswith(".bias"):
            stored_as = "F32"
        number = gguf.GGMLQuantizationType[stored_as]
        writer.add_tensor(stored, _quantized(values, stored_as, random), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-*.gguf")) if split else path


def _add_metadata(writer: gguf.GGUFWriter, config: PretrainedConfig, kind: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    layers = config.num_hidden_layers + getattr(config, "num_mtp_layers", 0)
    writer.add_block_count(layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    if _SLIDING in ropes:
        writer.add_rope_freq_base_swa(ropes[_SLIDING]["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
        if kind in ("olmo2", "gemma3", "exaone4"):
            slides = [each == _SLIDING for each in config.layer_types]
            writer.add_sliding_window_pattern(slides)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    writer.add_vocab_size(config.vocab_size)
    if kind == "glm4moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_nextn_predict_layers(config.num_mtp_layers)
    if experts := getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    inner = config.intermediate_size if kind == "gpt-oss" else None
    if inner := getattr(config, "moe_intermediate_size", inner):
        writer.add_expert_feed_forward_length(inner)
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared)


def _apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """With gates and values of experts apart, as GGUF has them, by names of weights."""
    tensors = {}
    interleaved = any(name.endswith("self_attn.sinks") for name in state)  # gpt-oss
    for name, tensor in state.items():
        module, _, kind = name.partition("_proj")
        if name.endswith("sinks"):
            tensors[f"{name}.weight"] = tensor
        elif ".experts." not in name or kind.startswith("."):
            tensors[name] = tensor
        else:
            own = tensor.mT if interleaved and not kind else tensor
            kind = f"_proj.{kind.removeprefix('_') or 'weight'}"
            if module.endswith("gate_up"):
                halves = (own[:, ::2], own[:, 1::2]) if interleaved else own.chunk(2, dim=1)
                for half, part in zip(("gate", "up"), halves, strict=True):
                    tensors[module.removesuffix("gate_up") + half + kind] = part.contiguous()
            else:
                tensors[module + kind] = own.contiguous()
    return tensors


def _quantized(values: NDArray[np.float32], kind: str, random: np.random.Generator) -> NDArray[Any]:
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
