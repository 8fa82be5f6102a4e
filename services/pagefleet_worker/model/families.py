"""The architectures that the decoder covers, as data (see `family`)."""

from pagefleet_kernels.layers import CLAMP, CLAMP_SLOPE, Activation
from pagefleet_worker.model.family import (
    ACTIVATIONS,
    EXPERT_ACTIVATIONS,
    Family,
    QkNorm,
    all_sliding,
    even_sliding_below,
    sliding_but_the_last,
    sliding_unturned,
)

_BIASES = {"attention_bias": False}
_UPPER_WINDOWS = {
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "layer_types": None,
}

_MLP_BIASES = {**_BIASES, "mlp_bias": False}
_GEMMA = {"tie_word_embeddings": True, **_BIASES}
_GEMMA_NORMS = {"norm_offset": 1.0, "wide_norms": True}
_GEMMA_2_AND_3 = {
    **_GEMMA,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_OLMO_2 = {
    "pre_norms": False,
    "post_norms": True,
    "wide_norms": True,
    "qk_norm": QkNorm.WHOLE,
}
_GLM = {"output_bias": False, "fused": ("gate_up",)}
_QWEN_EXPERTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_experts": None,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}

_LATENTS = {
    "rms_norm_eps": 1e-6,
    **_BIASES,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

FAMILIES = {
    "llama": Family(_MLP_BIASES),
    "mistral": Family({"sliding_window": 4096}, layer_types=all_sliding),
    "qwen2": Family(_UPPER_WINDOWS, {"qkv_bias": True}),
    "qwen3": Family({**_BIASES, **_UPPER_WINDOWS, "head_dim": 128}, {"qk_norm": QkNorm.HEADS}),
    "gemma": Family(
        {**_GEMMA, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
        _GEMMA_NORMS,
        root_embedding=True,
        activations={**ACTIVATIONS, "gelu": Activation.GELU_TANH},  # as they meant it
    ),
    "gemma2": Family(
        {
            **_GEMMA_2_AND_3,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        {**_GEMMA_NORMS, "post_norms": True},
        layer_types=sliding_but_the_last,
        root_embedding=True,
    ),
    "gemma3_text": Family(
        {
            **_GEMMA_2_AND_3,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
        },
        {**_GEMMA_NORMS, "post_norms": True, "qk_norm": QkNorm.HEADS},
        layer_types=sliding_but_the_last,
        theta=1000000.0,
        local_theta=10000.0,
        root_embedding=True,
    ),
    "phi3": Family(
        {"sliding_window": None},
        {"fused": ("qkv", "gate_up")},
        layer_types=all_sliding,
        partial_rope=1.0,
    ),
    "olmo2": Family(_BIASES, _OLMO_2),
    "olmo3": Family(
        {**_BIASES, "sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
        _OLMO_2,
        layer_types=sliding_but_the_last,
        theta=500000.0,
        local_theta=500000.0,
    ),
    "smollm3": Family(
        {
            **_MLP_BIASES,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        layer_types=sliding_unturned,
        theta=2000000.0,
    ),
    "granite": Family(
        {
            **_MLP_BIASES,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        }
    ),
    "glm": Family(
        {"attention_bias": True, "head_dim": 128},
        _GLM,
        partial_rope=0.5,
        interleaved_rope=True,
    ),
    "glm4": Family(
        {"attention_bias": True, "head_dim": 128},
        {
            **_GLM,
            "post_norms": True,
            "names": {
                "post_attention_layernorm": "post_self_attn_layernorm",
                "pre_feedforward_layernorm": "post_attention_layernorm",
                "post_feedforward_layernorm": "post_mlp_layernorm",
            },
        },
        partial_rope=0.5,
        interleaved_rope=True,
    ),
    "seed_oss": Family(
        {
            **_MLP_BIASES,
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
        }
    ),
    "exaone4": Family(
        {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        {"pre_norms": False, "post_norms": True, "qk_norm": QkNorm.HEADS},
        layer_types=sliding_but_the_last,
        still_full=True,
    ),
    "ernie4_5": Family(
        {"use_bias": False, "tie_word_embeddings": True, "head_dim": 128},
        theta=500000.0,
        interleaved_rope=True,
    ),
    "mixtral": Family(
        {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
        layer_types=all_sliding,
        theta=1000000.0,
        activations=EXPERT_ACTIVATIONS,
    ),
    "qwen2_moe": Family(
        {
            **_QWEN_EXPERTS,
            "qkv_bias": True,
            "layer_types": None,
            "max_window_layers": 28,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        layer_types=even_sliding_below,
        activations=EXPERT_ACTIVATIONS,
    ),
    "qwen3_moe": Family(
        {
            **_BIASES,
            **_QWEN_EXPERTS,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        {"qk_norm": QkNorm.HEADS},
        layer_types=all_sliding,
        activations=EXPERT_ACTIVATIONS,
    ),
    "glm4_moe": Family(
        {
            **_BIASES,
            "use_qk_norm": False,
            "num_local_experts": None,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        },
        {"output_bias": False},
        partial_rope=0.5,
        sigmoid_router=True,
        activations=EXPERT_ACTIVATIONS,
    ),
    "olmoe": Family(
        {
            **_BIASES,
            "clip_qkv": None,
            "num_experts": None,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        {"qk_norm": QkNorm.WHOLE},
        activations=EXPERT_ACTIVATIONS,
    ),
    "gpt_oss": Family(
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "layer_types": None,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_limit": CLAMP,
            "swiglu_alpha": CLAMP_SLOPE,
        },
        {"wide_norms": True, "sinks": True, "mlp_bias": True, "interleaved_experts": True},
        layer_types=sliding_but_the_last,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        theta=150000.0,
        activations={"silu": Activation.CLAMPED},
    ),
    "deepseek_v2": Family(
        {
            **_LATENTS,
            "n_routed_experts": 64,
            "num_experts_per_tok": 0,
            "moe_intermediate_size": 1407,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
            "n_group": None,
            "topk_group": None,
            "routed_scaling_factor": 1.0,
        },
        activations=EXPERT_ACTIVATIONS,
    ),
    "deepseek_v3": Family(
        {
            **_LATENTS,
            "rope_interleave": True,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "norm_topk_prob": True,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
        sigmoid_router=True,
        activations=EXPERT_ACTIVATIONS,
    ),
}
"""By the `model_type` of a config."""
