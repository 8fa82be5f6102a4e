"""The architectures that the decoder covers, as data: what a config leaves to its class.

A config in Hugging Face's terms is read by a class of transformers, which knows some fields and not
others, has defaults for those that are silent, and stands for what no field says. A `Family` is all
of that for one class.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import msgspec

from pagefleet_kernels.layers import CLAMP, CLAMP_SLOPE, Activation

FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of layers, as `layer_types` names them: those with a window see no further."""


class QkNorm(Enum):
    """Which vectors of queries and keys are normed before they are rotated."""

    NONE = 0
    HEADS = 1
    """Each head by itself."""
    WHOLE = 2
    """All heads of a token together."""


Size = Annotated[int, msgspec.Meta(ge=1)]


class _Common(msgspec.Struct, frozen=True):
    """The fields that all families read."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    rms_norm_eps: float
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"


class HfConfig(_Common, frozen=True):
    """The fields that some family reads; their defaults here are those of a model without them."""

    hidden_activation: str | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = True
    sliding_window_pattern: Size = 1
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 0
    query_pre_attn_scalar: float | None = None
    attention_multiplier: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    shared_expert_intermediate_size: int = 0
    qkv_bias: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    swiglu_limit: float = CLAMP
    swiglu_alpha: float = CLAMP_SLOPE
    n_routed_experts: int | None = None
    n_shared_experts: Annotated[int, msgspec.Meta(ge=0)] | None = None
    first_k_dense_replace: int = 0
    topk_method: str | None = None
    n_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    kv_lora_rank: Size | None = None
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    rope_interleave: bool = True


LayerTypes = Callable[[HfConfig], list[str]]
"""The kind of each layer of a model whose config does not name them."""


def _sliding(raw: HfConfig) -> list[str]:
    return [SLIDING] * raw.num_hidden_layers


def _upper(raw: HfConfig) -> list[str]:
    """Those above `max_window_layers` have windows."""
    layers = range(raw.num_hidden_layers)
    return [SLIDING if layer >= raw.max_window_layers else FULL for layer in layers]


def _even_below(raw: HfConfig) -> list[str]:
    """Those of even numbers below `max_window_layers` have windows."""
    layers = range(raw.num_hidden_layers)
    return [FULL if layer % 2 or layer >= raw.max_window_layers else SLIDING for layer in layers]


def _but_the_last(raw: HfConfig) -> list[str]:
    """Of `sliding_window_pattern` layers all but the last have windows."""
    layers, every = range(1, raw.num_hidden_layers + 1), raw.sliding_window_pattern
    return [SLIDING if layer % every else FULL for layer in layers]


def _unturned(raw: HfConfig) -> list[str]:
    """Those without rope have windows, if any have."""
    sliding = raw.use_sliding_window and raw.sliding_window
    return [FULL if turned or not sliding else SLIDING for turned in turned_layers(raw)]


def turned_layers(raw: HfConfig) -> list[bool]:
    """Which layers have a rope."""
    if raw.no_rope_layers is not None:  # in spite of the name, 1 says that a layer has one
        return [bool(turned) for turned in raw.no_rope_layers[: raw.num_hidden_layers]]
    layers, every = range(1, raw.num_hidden_layers + 1), raw.no_rope_layer_interval
    return [not every or layer % every > 0 for layer in layers]


ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
_OF_EXPERTS = {"silu": Activation.SILU}


@dataclass(frozen=True)
class Family:
    """One class of configs.

    reads: fields that it reads beside those that all do, and those whose defaults are others, with
        these.
    always: fields of `DecoderConfig` that hold for all of its models.
    layer_types: see `LayerTypes`.
    rope: its parameters if the config says none.
    theta: that of a rope of which the config says none.
    local_theta: the same of layers with windows, where these have a rope of their own.
    partial_rope: whether a rope may turn a part of each head only.
    root_embedding: whether embeddings are multiplied by the root of their size.
    sigmoid_router: see `Routing.sigmoid`; the scores have corrections then.
    activations: by their names.
    """

    reads: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    layer_types: LayerTypes = _upper
    rope: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    local_theta: float | None = None
    partial_rope: bool = False
    root_embedding: bool = False
    sigmoid_router: bool = False
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)

    def fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What it reads of a config, and its defaults for what that leaves out."""
        common = _Common.__struct_fields__
        known = {name: v for name, v in values.items() if name in common or name in self.reads}
        return {**self.reads, **known}


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
    "mistral": Family({"sliding_window": 4096}, layer_types=_sliding),
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
        layer_types=_but_the_last,
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
        layer_types=_but_the_last,
        theta=1000000.0,
        local_theta=10000.0,
        root_embedding=True,
    ),
    "phi3": Family(
        {"sliding_window": None}, {"fused": True}, layer_types=_sliding, partial_rope=True
    ),
    "olmo2": Family(_BIASES, _OLMO_2),
    "olmo3": Family(
        {**_BIASES, "sliding_window": 4096, "layer_types": None, "sliding_window_pattern": 4},
        _OLMO_2,
        layer_types=_but_the_last,
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
        layer_types=_unturned,
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
    "mixtral": Family(
        {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
        layer_types=_sliding,
        theta=1000000.0,
        activations=_OF_EXPERTS,
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
        layer_types=_even_below,
        activations=_OF_EXPERTS,
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
        layer_types=_sliding,
        activations=_OF_EXPERTS,
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
        layer_types=_but_the_last,
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
        activations=_OF_EXPERTS,
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
        activations=_OF_EXPERTS,
    ),
}
"""By the `model_type` of a config."""
