"""The config of a model in a GGUF file, in Hugging Face's terms.

The keys are those of the GGUF specification (ggml, docs/gguf.md) under the architecture's name.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pagefleet_worker.checkpoints.gguf_file import GgufTensor
from pagefleet_worker.model.config import DecoderConfig, parse_config
from pagefleet_worker.model.families import FAMILIES
from pagefleet_worker.model.family import FULL, SLIDING
from pagefleet_worker.model_files import ModelError

_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "granite": "granite",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5",
    "olmoe": "olmoe",
}
"""What Hugging Face calls an architecture. A llama with experts is a Mixtral, and an olmo2 with
windows is an OLMo 3.
"""

_OPTIONAL = {
    "attention.causal": "is_causal",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
"""Keys under the architecture's name, and the fields that they are."""

_SCALINGS = {
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
}
"""Keys of `rope.scaling`, and the fields that they are, of each type."""

_NEUTRAL = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
"""Keys of `rope.scaling` of which only these values are known."""

_BIASES = {
    "qkv_bias": ("attn_q", "attn_k", "attn_v"),
    "output_bias": ("attn_output",),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
"""Switches of the decoder, and the tensors that they let it read."""

_LARGEST_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and layers of those that scale scores by another size than that of a head, which no
key says (llama.cpp knows them by their layers too).
"""


def gguf_config(metadata: dict[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The config of a file's model, in Hugging Face's terms.

    Raises:
        ModelError: the decoder does not cover this model; a sentence says why.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in tuple(_MODEL_TYPES):
        raise ModelError(
            f"The GGUF architecture {architecture!r} is not supported; these are: "
            f"{', '.join(_MODEL_TYPES)}."
        )

    def value(key: str, default: Any = None) -> Any:
        full = f"{architecture}.{key}"
        if (found := metadata.get(full, default)) is None:
            raise ModelError(f"The GGUF metadata lacks {full!r}. Convert the model again.")
        if not isinstance(found, int | float):
            raise ModelError(f"In the GGUF metadata {full!r} is {found!r}, not one number.")
        return found

    def size(key: str, default: int | None = None) -> int:
        if (found := value(key, default)) < 1:
            raise ModelError(f"In the GGUF metadata '{architecture}.{key}' is {found}, no size.")
        return int(found)

    if "token_embd.weight" not in tensors:
        raise ModelError("The GGUF file lacks the tensor 'token_embd.weight'.")
    heads = size("attention.head_count")
    hidden_size = size("embedding_length")
    config = {
        "model_type": _MODEL_TYPES[architecture],
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count") - value("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": size("attention.key_length", hidden_size // heads),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "rope_theta": value("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "use_bias": "blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    for key, field in _OPTIONAL.items():
        if f"{architecture}.{key}" in metadata:
            config[field] = value(key)
    config |= _layer_types(metadata.get(f"{architecture}.attention.sliding_window_pattern"))
    if value("expert_count", 0):
        config |= _experts(config, value)
    if architecture == "granite" and not value("rope.scaling.finetuned", True):
        raise ModelError("A Granite without rotary embedding is not supported.")
    config |= _unsaid(architecture, config)
    turned = value("rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = turned / config["head_dim"]
    if f"{architecture}.rope.dimension_sections" in metadata:
        raise ModelError("The text model of one that sees is not supported: it turns otherwise.")
    if (scaling := _rope_scaling(architecture, metadata, tensors, config)) is not None:
        config["rope_scaling"] = scaling
    _check_biases(parse_config(config), tensors)  # what cannot be computed is refused now
    return config


def _check_biases(config: DecoderConfig, tensors: Mapping[str, GgufTensor]) -> None:
    """Refuse those that the decoder would leave out."""
    for switch, names in _BIASES.items():
        for name in names:
            if f"blk.0.{name}.bias" in tensors and not getattr(config, switch):
                raise ModelError(
                    f"The file has biases ({name}.bias), as no {config.architecture} model has."
                )


def _layer_types(pattern: int | list[bool] | None) -> dict[str, Any]:
    """Which layers have windows: of so many all but the last, or each by itself."""
    if pattern is None:
        return {}
    if isinstance(pattern, list):
        return {"layer_types": [SLIDING if slides else FULL for slides in pattern]}
    return {"sliding_window_pattern": pattern}


def _experts(config: dict[str, Any], value: Callable[..., Any]) -> dict[str, Any]:
    """What differs in a model with experts. llama.cpp makes the weights of those of a token sum up
    to 1 where no key says, but not in a Qwen2-MoE or an OLMoE.
    """
    model_type, inner_size = config["model_type"], config["intermediate_size"]
    sigmoid = model_type in FAMILIES and FAMILIES[model_type].sigmoid_router
    if value("expert_gating_func", gating := 2 if sigmoid else 1) != gating:
        raise ModelError(f"The experts of a {model_type} are not chosen as its file says.")
    shared = inner_size if model_type == "qwen2_moe" else 0
    return {
        "model_type": "mixtral" if model_type == "llama" else model_type,
        "num_local_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "moe_intermediate_size": value("expert_feed_forward_length", inner_size),
        "shared_expert_intermediate_size": value("expert_shared_feed_forward_length", shared),
        "norm_topk_prob": bool(
            value("expert_weights_norm", model_type not in ("qwen2_moe", "olmoe"))
        ),
    }


def _unsaid(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """What no key says of an architecture's models, and what holds where one is missing."""
    head_dim, layers = config["head_dim"], config["num_hidden_layers"]
    match architecture:
        case "mistral" | "exaone4":
            return {"sliding_window": config.get("sliding_window")}
        case "gemma2" | "gemma3":
            largest = (architecture, layers) in _LARGEST_GEMMAS
            scaled = config["hidden_size"] / config["num_attention_heads"] if largest else head_dim
            return {"query_pre_attn_scalar": scaled}
        case "granite":
            return {"attention_multiplier": config.get("attention_multiplier") or head_dim**-0.5}
        case "olmo2" if config.get("sliding_window"):
            theta = config.get("rope_local_base_freq", config["rope_theta"])
            return {"model_type": "olmo3", "rope_local_base_freq": theta}
    return {}


def _rope_scaling(
    architecture: str,
    metadata: dict[str, Any],
    tensors: Mapping[str, GgufTensor],
    config: dict[str, Any],
) -> dict[str, Any] | None:
    if "rope_freqs.weight" in tensors:
        return _llama3_rope_scaling(tensors["rope_freqs.weight"].data, config)
    if not {f"rope_factors_{kind}.weight" for kind in ("short", "long")} <= tensors.keys():
        return _metadata_rope_scaling(architecture, metadata)
    said = {
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "attn_factor",
    }
    keys = {field: f"{architecture}.rope.scaling.{key}" for field, key in said.items()}
    return {
        "rope_type": "longrope",
        "long_factor": tensors["rope_factors_long.weight"].data.tolist(),
        "short_factor": tensors["rope_factors_short.weight"].data.tolist(),
        **{field: metadata[key] for field, key in keys.items() if key in metadata},
    }


def _metadata_rope_scaling(architecture: str, metadata: dict[str, Any]) -> dict[str, Any] | None:
    prefix = f"{architecture}.rope.scaling."
    said = {key[len(prefix) :]: v for key, v in metadata.items() if key.startswith(prefix)}
    kind = said.get("type", "linear" if "factor" in said else "none")
    if kind == "none":
        return None
    strange = any(said.get(key, neutral) != neutral for key, neutral in _NEUTRAL.items())
    if kind not in tuple(_SCALINGS) or "factor" not in said or strange:
        raise ModelError(
            f"The GGUF metadata asks for rope scaling {kind!r} with {said}; only linear and yarn, "
            "with a factor, are supported."
        )
    fields = _SCALINGS[kind]
    scaling = {fields[key]: v for key, v in said.items() if key in fields}
    if architecture == "gpt-oss":  # as it was trained, and no key says
        scaling["truncate"] = False
    return {"rope_type": kind, **scaling}


def _llama3_rope_scaling(factors: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The parameters behind `factors` (float32 (head_dim / 2,)), by which frequencies are divided.

    GGUF keeps only the factors. Llama 3.1 to 3.3 differ in the largest one and share the other
    parameters, so these are assumed and the factors that follow are compared with the file's.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    dim = config["head_dim"]
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    smooth = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ModelError(
            "The GGUF file's rope_freqs.weight is not Llama 3's frequency scaling, which is the "
            "only one supported. Use the model's safetensors instead."
        )
    return scaling
