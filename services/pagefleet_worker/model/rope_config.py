"""Which layers have windows, and how positions turn in each, as a config says it."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagefleet_worker.model.family import FULL, SLIDING, Family, HfConfig, converted, turned_layers
from pagefleet_worker.model.rope import VARIANTS, LongRope, Rope
from pagefleet_worker.model_files import ModelError


def kinds_of_layers(family: Family, raw: HfConfig) -> list[str]:
    """Which layers have a window.

    Raises:
        ModelError: there are other kinds.
    """
    if not (raw.sliding_window and raw.use_sliding_window) and family.local_theta is None:
        return [FULL] * raw.num_hidden_layers
    kinds = raw.layer_types or family.layer_types(raw)
    if unknown := sorted(set(kinds) - {FULL, SLIDING}):
        raise ModelError(f"Layers of {', '.join(unknown)} are not supported.")
    _check_all_layers("layer_types", kinds, raw)
    return kinds


def _check_all_layers(field: str, found: Sequence[object], raw: HfConfig) -> None:
    if len(found) != raw.num_hidden_layers:
        raise ModelError(
            f"It has {raw.num_hidden_layers} layers, and {field} names {len(found)}: the config is "
            "malformed."
        )


def ropes_of_layers(
    family: Family, values: dict[str, Any], raw: HfConfig, kinds: list[str]
) -> tuple[Rope, ...]:
    """The rope of each layer.

    Raises:
        ModelError: the decoder does not cover it, or it is malformed.
    """
    ropes = {kind: _rope(family, values, raw, kind) for kind in set(kinds)}
    turned_ones = turned_layers(raw)
    _check_all_layers("no_rope_layers", turned_ones, raw)
    if family.still_full and raw.sliding_window:
        turned_ones = [kind == SLIDING for kind in kinds]
    still = Rope(rope_theta=family.theta, partial_rotary_factor=0.0)
    each = zip(kinds, turned_ones, strict=True)
    return tuple(ropes[kind] if turned else still for kind, turned in each)


def _rope(family: Family, values: dict[str, Any], raw: HfConfig, kind: str) -> Rope:
    """The rope of layers of a kind."""
    parameters = _rope_parameters(family, values, kind)
    variant = parameters.get("rope_type", parameters.get("type", "default"))
    if variant not in VARIANTS:
        raise ModelError(
            f"The rope variant {variant!r} is not supported; these are: {', '.join(VARIANTS)}."
        )
    partial = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1) and family.partial_rope is None:
        raise ModelError("A rotary embedding of a part of each head is not supported.")
    said = {
        "original_max_position_embeddings": values.get(
            "original_max_position_embeddings", raw.max_position_embeddings
        ),
        "max_position_embeddings": raw.max_position_embeddings,
        **parameters,
        "partial_rotary_factor": (family.partial_rope or 1.0) if partial is None else partial,
        "interleaved": family.interleaved_rope,
    }
    rope = converted(said, VARIANTS[variant])
    if isinstance(rope, LongRope):
        _check_factors(rope, raw.head_dim or raw.hidden_size // raw.num_attention_heads)
    return rope


def _check_factors(rope: LongRope, head_dim: int) -> None:
    counts, pairs = {len(rope.short_factor), len(rope.long_factor)}, rope.turned(head_dim) / 2
    if counts != {pairs}:
        raise ModelError(
            f"Longrope has {' or '.join(map(str, sorted(counts)))} factors, and {pairs:g} pairs "
            "turn in each head: the config is malformed."
        )


def _rope_parameters(family: Family, values: dict[str, Any], kind: str) -> dict[str, Any]:
    """Those that the config has for a kind of layers. Older configs spread them over `rope_scaling`
    and `rope_theta`, and have scaling for layers without windows alone, if the kinds differ.
    """
    said = values.get("rope_parameters") or values.get("rope_scaling")
    found = _table(said or family.rope)
    theta = values.get("rope_theta") or family.theta
    if family.local_theta is None:
        return {"rope_theta": theta, **found}
    if kind == SLIDING:
        theta = values.get("rope_local_base_freq") or family.local_theta
    own = found.get(kind, {} if kind == SLIDING or SLIDING in found else found)
    return {"rope_theta": theta, **_table(own or {})}


def _table(found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise ModelError(f"The parameters of its rope are {found!r}: the config is malformed.")
    return found
