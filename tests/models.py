"""Small models with random weights, one for every architecture and rope variant that is served."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteSWAConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
    SeedOssConfig,
    SmolLM3Config,
    Starcoder2Config,
    VaultGemmaConfig,
)

VOCAB_SIZE = 272
EOS = 257

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": None,
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
)


@dataclass(frozen=True)
class Variant:
    """A config class of transformers and what is changed in it."""

    config: type
    changes: dict[str, Any] = field(default_factory=dict)


_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_FULL_LAYERS = ["full_attention"] * 3

VARIANTS = {
    "llama": Variant(LlamaConfig),
    "llama-biases": Variant(LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": Variant(LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-linear": Variant(
        LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
    ),
    "llama-llama3": Variant(
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": Variant(
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "mistral": Variant(MistralConfig, {"sliding_window": 24, "head_dim": 32}),
    "qwen2": Variant(Qwen2Config),
    "qwen2-window": Variant(
        Qwen2Config, {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "qwen3": Variant(Qwen3Config, {"head_dim": 32}),
    "gemma2": Variant(
        Gemma2Config,
        {
            "head_dim": 32,
            "sliding_window": 20,
            "layer_types": _LAYER_TYPES,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
}
"""Architectures of the native decoder."""

COUSINS = {
    "gemma3": Variant(
        Gemma3TextConfig, {"head_dim": 32, "sliding_window": 20, "layer_types": _LAYER_TYPES}
    ),
    "phi3": Variant(Phi3Config, {"sliding_window": 24}),
    "gemma": Variant(GemmaConfig, {"head_dim": 32}),
    "olmo2": Variant(Olmo2Config),
    "olmo3": Variant(Olmo3Config, {"sliding_window": 20, "layer_types": _LAYER_TYPES}),
    "smollm3": Variant(SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "granite": Variant(
        GraniteConfig,
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "glm": Variant(GlmConfig, {"head_dim": 32}),
    "glm4": Variant(Glm4Config, {"head_dim": 32}),
    "seed-oss": Variant(SeedOssConfig, {"head_dim": 32, "attention_out_bias": True}),
    "exaone4": Variant(Exaone4Config, {"sliding_window": 20, "layer_types": _LAYER_TYPES}),
    "exaone4-full": Variant(Exaone4Config, {"sliding_window": None, "layer_types": _FULL_LAYERS}),
    "ernie4_5": Variant(Ernie4_5Config, {"head_dim": 32, "use_bias": True}),
    "phi3-partial": Variant(
        Phi3Config, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}
    ),
}
"""More of them, which differ from a variant in a switch or two."""

MIXTURES = {
    "mixtral": Variant(
        MixtralConfig, {"head_dim": 32, "num_local_experts": 4, "sliding_window": 24}
    ),
    "qwen2-moe": Variant(
        Qwen2MoeConfig,
        {
            "head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "qwen3-moe": Variant(
        Qwen3MoeConfig,
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "glm4-moe": Variant(
        Glm4MoeConfig,
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "num_mtp_layers": 0,
        },
    ),
    "olmoe": Variant(OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 2}),
    "gpt-oss": Variant(
        GptOssConfig,
        {
            "head_dim": 32,
            "sliding_window": 20,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}
"""Those with experts."""

_YARN_OF_LATENTS = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 128,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 40,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

LATENTS = {
    "deepseek-v2": Variant(
        DeepseekV2Config,
        {
            **_LATENTS,
            "q_lora_rank": 32,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "rope_parameters": _YARN_OF_LATENTS,
        },
    ),
    "deepseek-v2-lite": Variant(DeepseekV2Config, {**_LATENTS, "q_lora_rank": None}),
    "deepseek-v3": Variant(
        DeepseekV3Config,
        {
            **_LATENTS,
            "q_lora_rank": 32,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": _YARN_OF_LATENTS,
        },
    ),
    "deepseek-v3-halves": Variant(
        DeepseekV3Config,
        {**_LATENTS, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
}
"""Those whose pool keeps latents; they have experts too."""

ADAPTED = {
    "gpt2": Variant(GPT2Config, {"num_key_value_heads": 4}),
    "opt": Variant(OPTConfig, {"num_key_value_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 32}),
    "vaultgemma": Variant(
        VaultGemmaConfig,
        {
            "head_dim": 32,
            "sliding_window": 20,
            "layer_types": _LAYER_TYPES,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "granite-swa": Variant(GraniteSWAConfig, {"sliding_window": 20, "layer_types": _LAYER_TYPES}),
    "cohere2": Variant(Cohere2Config, {"sliding_window": 20, "layer_types": _LAYER_TYPES}),
    "starcoder2": Variant(Starcoder2Config, {"sliding_window": 24}),
    "ernie4_5-moe": Variant(
        Ernie4_5_MoeConfig,
        {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
        },
    ),
}
"""Architectures that run through transformers' attention interface."""

REFUSED = {
    "bart": Variant(
        BartConfig,
        {
            "num_key_value_heads": 4,
            "d_model": 64,
            "decoder_layers": 3,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
        },
    ),
    "bert": Variant(BertConfig, {"num_key_value_heads": 4}),
    "bloom": Variant(BloomConfig, {"num_key_value_heads": 4}),
    "falcon": Variant(FalconConfig),
    "gpt2-grouped": Variant(GPT2Config),
    "llama4": Variant(
        Llama4TextConfig, {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2}
    ),
    "mamba": Variant(MambaConfig),
    "phimoe": Variant(PhimoeConfig, {"sliding_window": 8, "num_local_experts": 4}),
    "roberta": Variant(RobertaConfig, {"is_decoder": True, "num_key_value_heads": 4}),
}
"""Architectures that would fail in silence, each in a way of its own."""


def make_model(name: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save the variant `name` with random weights in Hugging Face's layout."""
    variant = (VARIANTS | COUSINS | MIXTURES | LATENTS | ADAPTED | REFUSED)[name]
    config = variant.config(**(_SIZES | variant.changes | changes))
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        corrections = [each for each in model.named_buffers() if "correction" in each[0]]
        for path, weight in [*model.named_parameters(), *corrections]:
            noise = torch.randn(weight.shape, generator=generator)
            if path.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * noise)
            elif weight.dim() == 1:
                weight.copy_(0.2 * noise)
            else:
                weight.copy_(noise / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = _CHAT_TEMPLATE
    return fast
