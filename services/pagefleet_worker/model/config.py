"""What the decoder must know of a model: `DecoderConfig`, read from a config in HF's terms.

Models of many families (`families`) are one computation with a few switches: where norms are and
how they round, biases, windows and ropes of each layer, an activation, factors and soft caps. A
config that asks for anything else is refused: a model that runs almost right is worse than one that
does not start.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagefleet.manifest import CONFIG_FILE
from pagefleet_kernels.layers import CLAMP, CLAMP_SLOPE, Activation
from pagefleet_worker.checkpoints.formats import format_of
from pagefleet_worker.checkpoints.stored_matrix import Format
from pagefleet_worker.model.expert_config import ExpertFields, ExpertShape
from pagefleet_worker.model.families import FAMILIES
from pagefleet_worker.model.family import SLIDING, Family, HfConfig, QkNorm, converted
from pagefleet_worker.model.latent_config import LatentShape
from pagefleet_worker.model.rope import LongRope, Rope
from pagefleet_worker.model.rope_config import kinds_of_layers, ropes_of_layers
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.paging.causal_model import ModelShape

ARCHITECTURES = tuple(FAMILIES)
"""Values of `model_type` that are supported."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelShape):
    """Sizes and switches of one decoder; the switches are off by default.

    pre_norms: whether attention and feed-forward part read normed numbers.
    post_norms: whether what they give is normed before it is added.
    norm_offset: what is added to the weights of norms before they multiply.
    wide_norms: whether norms are rounded once, behind their weights, which are float32.
    ropes: of each layer.
    scale: see `reference.attention`, as for `softcap`.
    embedding_scale: the factor on embedded tokens, rounded to the numbers' type.
    residual_factor: the factor on what attention and feed-forward part add.
    logits_softcap: logits become cap * tanh(logit / cap), after they are divided by
        `logits_divisor`; 0 means off.
    experts: those of each layer, None where the feed-forward part is dense; empty if all are.
    interleaved_experts: how files hold theirs, see `checkpoints.expert_names`.
    sinks: whether heads have attention sinks.
    latent: what keys and values are made of, if the pool keeps that in their place.
    fused: which of `qkv`, queries, keys and values, and `gate_up`, gates and values, the files hold
        as one matrix.
    names: what files call a part of a layer that has another name elsewhere.
    format: how matrices are stored that are quantized; None if none are.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    ropes: tuple[Rope, ...]
    max_positions: int
    scale: float
    tied_embeddings: bool
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    wide_norms: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = Activation.SILU
    softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_factor: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0
    experts: tuple[ExpertShape | None, ...] = ()
    interleaved_experts: bool = False
    sinks: bool = False
    latent: LatentShape | None = None
    fused: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    format: Format | None = None

    def experts_of(self, layer: int) -> ExpertShape | None:
        """Those of a layer, if it has some."""
        return self.experts[layer] if self.experts else None

    @property
    def inner_sizes(self) -> set[int]:
        """How wide feed-forward parts are inside, each expert by itself."""
        parts = self.experts or (None,)
        return {self.intermediate_size if each is None else each.inner_size for each in parts}

    @property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """The modules, as files name them, that each matrix of a layer is stacked of."""
        heads = ("qkv",) if "qkv" in self.fused else ("q", "k", "v")
        gates = ("gate_up",) if "gate_up" in self.fused else ("gate", "up")
        qkv = {"qkv": tuple(f"self_attn.{name}_proj" for name in heads)}
        return {
            **(qkv if self.latent is None else self.latent.modules),
            "output": ("self_attn.o_proj",),
            "gate_up": tuple(f"mlp.{name}_proj" for name in gates),
            "down": ("mlp.down_proj",),
        }

    @property
    def planes(self) -> int:
        """See `ModelShape`."""
        return 2 if self.latent is None else 1

    @property
    def turned_dim(self) -> int:
        """Numbers of a head that its layer's rope is about."""
        return self.head_dim if self.latent is None else self.latent.turned

    @property
    def attended_size(self) -> int:
        """Width of what all heads give."""
        return self.query_size if self.latent is None else self.heads * self.latent.value

    def row_orders(self, layer: int) -> dict[str, Tensor]:
        """Which of the rows of a matrix of a layer that files have comes where: int64 [rows]; only
        of those that do not lie as they should. See `Rope.order`.
        """
        if self.latent is not None:
            return self.latent.row_orders(self.heads)
        order = self.ropes[layer].order(self.head_dim)
        if order is None:
            return {}
        begins = torch.arange(self.heads + self.kv_heads).unsqueeze(1) * self.head_dim
        rows = (begins + order).flatten()
        return {"qkv": torch.cat((rows, len(rows) + torch.arange(self.kv_size)))}

    @property
    def stretched(self) -> bool:
        """Whether positions turn as those of long sequences, by the longest one that is served."""
        return any(isinstance(rope, LongRope) and rope.long for rope in self.ropes)

    def within(self, length: int) -> "DecoderConfig":
        """The same for sequences of up to so many tokens."""
        return replace(self, ropes=tuple(rope.within(length) for rope in self.ropes))


def load_config(folder: Path) -> DecoderConfig:
    """The config of the prepared model in `folder`.

    Raises:
        ModelError: the decoder does not cover this model; a sentence says why.
    """
    return parse_config(json.loads((folder / CONFIG_FILE).read_bytes()))


def parse_config(values: dict[str, Any]) -> DecoderConfig:
    """Read a config in Hugging Face's terms.

    Raises:
        ModelError: the decoder does not cover this model; a sentence says why.
    """
    architecture = values.get("model_type")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"The architecture {architecture!r} is not supported; these are: "
            f"{', '.join(ARCHITECTURES)}."
        )
    family = FAMILIES[architecture]
    if values.get("is_causal") is False or values.get("use_bidirectional_attention"):
        raise ModelError("Its tokens see those that follow them; only causal attention is served.")
    raw = converted(family.fields(values), HfConfig)
    if raw.num_attention_heads % (raw.num_key_value_heads or 1):
        raise ModelError(
            f"{raw.num_attention_heads} attention heads cannot share "
            f"{raw.num_key_value_heads} key/value heads evenly: the config is malformed."
        )
    latent = _latent(raw)
    kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    head_dim = score_dim = turned = raw.head_dim or raw.hidden_size // raw.num_attention_heads
    if latent is not None:
        kv_heads, head_dim, score_dim, turned = 1, latent.entry, latent.query, latent.turned
    if not turned or turned % 2:
        raise ModelError(
            f"Its heads have {turned} dimensions, which do not turn in pairs: the config is "
            "malformed."
        )
    kinds = kinds_of_layers(family, raw)
    ropes = ropes_of_layers(family, values, raw, kinds)
    scale = raw.attention_multiplier or (raw.query_pre_attn_scalar or score_dim) ** -0.5
    output_bias = raw.attention_bias if raw.attention_out_bias is None else raw.attention_out_bias
    if raw.clip_qkv:
        raise ModelError("Queries, keys and values that are clipped (clip_qkv) are not supported.")
    switches = {
        "qkv_bias": raw.attention_bias or raw.qkv_bias or raw.use_bias,
        "output_bias": output_bias or raw.use_bias,
        "mlp_bias": raw.mlp_bias or raw.use_bias,
        "qk_norm": QkNorm.HEADS if raw.use_qk_norm else QkNorm.NONE,
        "embedding_scale": (
            raw.hidden_size**0.5 if family.root_embedding else raw.embedding_multiplier
        ),
        **family.always,
    }
    return DecoderConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=raw.rms_norm_eps,
        ropes=ropes,
        max_positions=raw.max_position_embeddings,
        windows=tuple((raw.sliding_window or 0) * (kind == SLIDING) for kind in kinds),
        scale=scale if latent is None else scale * ropes[0].temperature,
        tied_embeddings=raw.tie_word_embeddings,
        dtype=values.get("dtype") or values.get("torch_dtype"),
        activation=_activation(family, raw),
        softcap=raw.attn_logit_softcapping or 0.0,
        residual_factor=raw.residual_multiplier,
        logits_divisor=raw.logits_scaling,
        logits_softcap=raw.final_logit_softcapping or 0.0,
        experts=_experts(family, raw),
        latent=latent,
        format=format_of(values),
        **switches,
    )


def _latent(raw: HfConfig) -> LatentShape | None:
    if raw.kv_lora_rank is None:
        return None
    if raw.attention_bias:
        raise ModelError("Latents with biases (attention_bias) are not supported.")
    return LatentShape(
        rank=raw.kv_lora_rank,
        query_rank=raw.q_lora_rank,
        still=raw.qk_nope_head_dim,
        turned=raw.qk_rope_head_dim,
        value=raw.v_head_dim,
        interleaved=raw.rope_interleave,
    )


def _experts(family: Family, raw: HfConfig) -> tuple[ExpertShape | None, ...]:
    count = raw.num_experts or raw.num_local_experts or raw.n_routed_experts
    if not count:
        return ()
    inner_size, method = raw.moe_intermediate_size or raw.intermediate_size, raw.topk_method
    if method not in (None, "greedy", "group_limited_greedy"):
        raise ModelError(
            f"Experts that are chosen by the topk_method {method!r} are not supported."
        )
    if method is not None and raw.norm_topk_prob:
        raise ModelError(f"norm_topk_prob with the topk_method {method!r} is not supported.")
    grouped = method != "greedy"
    return ExpertFields(
        count=count,
        num_experts_per_tok=raw.num_experts_per_tok,
        inner_size=inner_size,
        norm_topk_prob=raw.norm_topk_prob,
        shared_size=raw.shared_expert_intermediate_size or (raw.n_shared_experts or 0) * inner_size,
        weighted_shared=raw.n_shared_experts is None,
        decoder_sparse_step=raw.decoder_sparse_step,
        mlp_only_layers=raw.mlp_only_layers or [],
        first_k_dense_replace=raw.first_k_dense_replace,
        sigmoid=family.sigmoid_router,
        n_group=(raw.n_group or 1) if grouped else 1,
        topk_group=(raw.topk_group or 1) if grouped else 1,
        routed_scaling_factor=raw.routed_scaling_factor,
    ).layers(raw.num_hidden_layers)


def _activation(family: Family, raw: HfConfig) -> Activation:
    name = raw.hidden_activation or raw.hidden_act
    if name not in family.activations:
        raise ModelError(
            f"The activation {name!r} is not supported; these are: "
            f"{', '.join(map(repr, family.activations))}."
        )
    if (raw.swiglu_limit, raw.swiglu_alpha) != (CLAMP, CLAMP_SLOPE):
        raise ModelError(
            f"Gates of a swiglu_limit of {raw.swiglu_limit} and a swiglu_alpha of "
            f"{raw.swiglu_alpha} are not supported; those of {CLAMP} and {CLAMP_SLOPE} are."
        )
    return family.activations[name]
