"""What a config leaves to its class.

A config in Hugging Face's terms is read by a class of transformers, which knows some fields and not
others, has defaults for those that are silent, and stands for what no field says. A `Family` is all
of that for one class; `families` are those that there are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, TypeVar

import msgspec

from pagefleet_kernels.layers import CLAMP, CLAMP_SLOPE, Activation
from pagefleet_worker.model_files import ModelError

_Kind = TypeVar("_Kind")

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
    attention_out_bias: bool | None = None
    use_bias: bool = False
    use_qk_norm: bool = False
    clip_qkv: float | None = None
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = True
    sliding_window_pattern: int | str | None = 1
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


def all_sliding(raw: HfConfig) -> list[str]:
    """All have windows."""
    return [SLIDING] * raw.num_hidden_layers


def upper_sliding(raw: HfConfig) -> list[str]:
    """Those above `max_window_layers` have windows."""
    layers = range(raw.num_hidden_layers)
    return [SLIDING if layer >= raw.max_window_layers else FULL for layer in layers]


def even_sliding_below(raw: HfConfig) -> list[str]:
    """Those of even numbers below `max_window_layers` have windows."""
    layers = range(raw.num_hidden_layers)
    return [FULL if layer % 2 or layer >= raw.max_window_layers else SLIDING for layer in layers]


def sliding_but_the_last(raw: HfConfig) -> list[str]:
    """Of `sliding_window_pattern` layers all but the last have windows."""
    layers, every = range(1, raw.num_hidden_layers + 1), raw.sliding_window_pattern
    if not isinstance(every, int) or every < 1:
        raise ModelError(
            f"Without layer_types a sliding_window_pattern of {every!r} does not say which layers "
            "have windows."
        )
    return [SLIDING if layer % every else FULL for layer in layers]


def sliding_unturned(raw: HfConfig) -> list[str]:
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
EXPERT_ACTIVATIONS = {"silu": Activation.SILU}


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
    partial_rope: the part of each head that a rope turns if the config says none; None if it may
        turn no part.
    interleaved_rope: see `Rope.interleaved`.
    still_full: whether layers without windows turn nothing where others have windows.
    root_embedding: whether embeddings are multiplied by the root of their size.
    sigmoid_router: see `Routing.sigmoid`; the scores have corrections then.
    activations: by their names.
    """

    reads: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    layer_types: LayerTypes = upper_sliding
    rope: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    local_theta: float | None = None
    partial_rope: float | None = None
    interleaved_rope: bool = False
    still_full: bool = False
    root_embedding: bool = False
    sigmoid_router: bool = False
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)

    def fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What it reads of a config, and its defaults for what that leaves out."""
        common = _Common.__struct_fields__
        known = {name: v for name, v in values.items() if name in common or name in self.reads}
        return {**self.reads, **known}


def converted(values: Mapping[str, Any], kind: type[_Kind]) -> _Kind:
    """The fields of a config as `kind` has them.

    Raises:
        ModelError: they are malformed.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"The model's config is malformed: {error}.") from error
