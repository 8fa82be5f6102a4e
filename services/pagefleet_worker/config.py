"""What the decoder must know of a model: `DecoderConfig`, read from a config in HF's terms.

Models of the Llama family are one computation with a few switches (biases, norms on queries and
keys, tied embeddings, windows). A config that asks for anything else is refused: a model that runs
almost right is worse than one that does not start.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pagefleet.manifest import CONFIG_FILE
from pagefleet_worker.causal_model import ModelShape
from pagefleet_worker.checkpoints import format_of
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.rope import VARIANTS, Rope
from pagefleet_worker.stored_matrix import Format

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` that are supported."""

_DEFAULT_THETA = 10000.0

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelShape):
    """Sizes and switches of one decoder.

    format: how matrices are stored that are quantized; None if none are.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    rope: Rope
    max_positions: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    format: Format | None = None


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
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"The activation {activation!r} is not supported; only 'silu' is.")
    if values.get("is_causal") is False:
        raise ModelError("Its tokens see those that follow them; only causal attention is served.")
    raw = _convert(values, _HfConfig)
    if raw.num_attention_heads % (raw.num_key_value_heads or 1):
        raise ModelError(
            f"{raw.num_attention_heads} attention heads cannot share "
            f"{raw.num_key_value_heads} key/value heads evenly: the config is malformed."
        )
    attention_bias = raw.attention_bias and architecture != "mistral"
    return DecoderConfig(
        architecture=architecture,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        layers=raw.num_hidden_layers,
        heads=raw.num_attention_heads,
        kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=raw.head_dim or raw.hidden_size // raw.num_attention_heads,
        norm_eps=raw.rms_norm_eps,
        rope=_rope(values, raw.max_position_embeddings),
        max_positions=raw.max_position_embeddings,
        windows=_windows(architecture, raw),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias and architecture != "qwen2",
        mlp_bias=raw.mlp_bias and architecture == "llama",
        qk_norm=architecture == "qwen3",
        tied_embeddings=raw.tie_word_embeddings,
        dtype=values.get("dtype") or values.get("torch_dtype"),
        format=format_of(values),
    )


class _HfConfig(msgspec.Struct, frozen=True):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    rms_norm_eps: float
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None


def _windows(architecture: str, raw: _HfConfig) -> tuple[int, ...]:
    """Which layers see a window only: all of Mistral's, the upper ones of Qwen's."""
    everywhere = architecture == "mistral"
    if not raw.sliding_window or not (everywhere or raw.use_sliding_window):
        return (0,) * raw.num_hidden_layers
    if everywhere:
        return (raw.sliding_window,) * raw.num_hidden_layers
    kinds = raw.layer_types or [
        "sliding_attention" if layer >= raw.max_window_layers else "full_attention"
        for layer in range(raw.num_hidden_layers)
    ]
    return tuple(raw.sliding_window if kind == "sliding_attention" else 0 for kind in kinds)


def _rope(values: dict[str, Any], max_positions: int) -> Rope:
    """The rope parameters, which older configs spread over `rope_scaling` and `rope_theta`."""
    parameters = {
        "rope_theta": values.get("rope_theta") or _DEFAULT_THETA,
        "original_max_position_embeddings": values.get(
            "original_max_position_embeddings", max_positions
        ),
        **(values.get("rope_parameters") or values.get("rope_scaling") or {}),
    }
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in VARIANTS:
        raise ModelError(
            f"The rope variant {kind!r} is not supported; these are: {', '.join(VARIANTS)}."
        )
    partial = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError("A rotary embedding of a part of each head is not supported.")
    return _convert(parameters, VARIANTS[kind])


def _convert(values: dict[str, Any], kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"The model's config is malformed: {error}.") from error
