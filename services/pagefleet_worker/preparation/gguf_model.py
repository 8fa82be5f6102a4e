"""A model in one GGUF file: config, tokenizer and chat template out of its metadata.

The keys are those of the GGUF specification (ggml, docs/gguf.md) under the architecture's name;
the config is in Hugging Face's terms.
"""

from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE

from pagefleet.manifest import Weights
from pagefleet_worker.checkpoints.gguf_file import GgufTensor, read_gguf
from pagefleet_worker.model_files import ModelError, ModelFiles
from pagefleet_worker.preparation.gguf_tokenizer import gguf_tokenizer
from pagefleet_worker.preparation.gguf_vocabulary import gguf_vocabulary

_MODEL_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_MODEL_TYPES = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}
"""Of architectures that Hugging Face calls otherwise."""

_OPTIONAL = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
"""Keys under the architecture's name, and the fields that they are."""

_LARGEST_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and layers of those that scale scores by another size than that of a head, which no
key says (llama.cpp knows them by their layers too).
"""


class _Pooling(IntEnum):
    """`<architecture>.pooling_type` of a model for embeddings."""

    NONE = 0
    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


def gguf_model(path: Path, name: str, *, own_tokenizer: bool = True) -> ModelFiles:
    """The model in the GGUF file `path`; a ModelError names what in it cannot be served. Without
    its `own_tokenizer`, which then may be of any kind, an empty one waits for its substitute.
    """
    file = read_gguf(path)
    metadata, vocabulary = file.metadata, gguf_vocabulary(file.metadata)
    config, roles = _config(metadata, file.tensors), vocabulary.roles
    architecture = metadata["general.architecture"]
    named = {
        f"{role}_token": vocabulary.tokens[roles[role]] for role in ("bos", "eos") if role in roles
    }
    return ModelFiles(
        name=name,
        config=config,
        tokenizer=gguf_tokenizer(vocabulary, architecture) if own_tokenizer else Tokenizer(BPE()),
        weights=Weights("gguf", (str(path.resolve()),)),
        special_tokens=named,
        chat_template=metadata.get("tokenizer.chat_template"),
        end_of_turn_ids=tuple(roles[role] for role in ("eot", "eom") if role in roles),
        embeds=_pooling(metadata) in (_Pooling.NONE, _Pooling.LAST),
    )


def _pooling(metadata: dict[str, Any]) -> int:
    pooling: int = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    return pooling


def _config(metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture not in _MODEL_CLASSES:
        raise ModelError(
            f"The GGUF architecture {architecture!r} is not supported; these are: "
            f"{', '.join(_MODEL_CLASSES)}."
        )

    def value(key: str, default: Any = None) -> Any:
        full = f"{architecture}.{key}"
        if (found := metadata.get(full, default)) is None:
            raise ModelError(f"The GGUF metadata lacks {full!r}. Convert the model again.")
        return found

    heads = value("attention.head_count")
    hidden_size = value("embedding_length")
    config = {
        "architectures": [_MODEL_CLASSES[architecture]],
        "model_type": _MODEL_TYPES.get(architecture, architecture),
        "hidden_size": hidden_size,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", hidden_size // heads),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "rope_theta": value("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if value("expert_count", 0):
        config |= _experts(config, value)
    for key, field in _OPTIONAL.items():
        if f"{architecture}.{key}" in metadata:
            config[field] = value(key)
    if architecture == "mistral":
        config.setdefault("sliding_window", None)
    if architecture in ("gemma2", "gemma3"):
        largest = (architecture, config["num_hidden_layers"]) in _LARGEST_GEMMAS
        config["query_pre_attn_scalar"] = hidden_size / heads if largest else config["head_dim"]
    turned = value("rope.dimension_count", config["head_dim"])
    if turned != config["head_dim"]:
        config["partial_rotary_factor"] = turned / config["head_dim"]
    if (scaling := _rope_scaling(architecture, metadata, tensors, config)) is not None:
        config["rope_scaling"] = scaling
    return config


def _experts(config: dict[str, Any], value: Callable[..., Any]) -> dict[str, Any]:
    """What differs in a model with experts. llama.cpp makes the weights of all that are read here
    sum up to 1, and calls Mixtral a llama.
    """
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return {
        **(mixtral if config["model_type"] == "llama" else {}),
        "num_local_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "moe_intermediate_size": value("expert_feed_forward_length", config["intermediate_size"]),
        "norm_topk_prob": True,
    }


def _rope_scaling(
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, GgufTensor],
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
    kind = said.get("type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or "factor" not in said:
        raise ModelError(
            f"The GGUF metadata asks for rope scaling {kind!r} with {said}; only linear and yarn, "
            "with a factor, are supported."
        )
    names = {"factor": "factor"}
    if kind == "yarn":
        names |= {
            "original_context_length": "original_max_position_embeddings",
            "attn_factor": "attention_factor",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }
    scaling = {hf: said[gguf] for gguf, hf in names.items() if gguf in said}
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
