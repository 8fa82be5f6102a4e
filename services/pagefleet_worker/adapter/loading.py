"""A model of transformers from its files: its sizes, then its weights, then the proof that it runs.

Nothing is unpickled and no code of a model's publisher is run: safetensors only, and only the
architectures that transformers itself knows. What would fail in silence stops the start: weights
that the files lack, angles that depend on the batch, whatever `model` refuses, and whatever it
computes otherwise than the model itself (`probe`).
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pagefleet.manifest import Weights
from pagefleet_kernels.dispatch import Kernels
from pagefleet_worker.adapter.model import AdaptedModel
from pagefleet_worker.adapter.probe import Expected, check
from pagefleet_worker.model.config import ARCHITECTURES
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.paging.causal_model import ModelShape

_log = logging.getLogger(__name__)

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def load_shape(folder: Path) -> ModelShape:
    """The sizes of the prepared model in `folder`.

    Raises:
        ModelError: transformers does not know it, or its layers are not all attention.
    """
    return _shape(_load_config(folder))


def load_adapted(
    folder: Path,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    length: int,
    progress: Callable[[], None],
) -> AdaptedModel:
    """Load the prepared model in `folder` and prove that it computes what transformers computes.

    Args:
        folder: where its config is.
        weights: its weight files.
        dtype: of the weights.
        device: where they go.
        kernels: those of the device.
        length: tokens of the longest sequence.
        progress: called at every layer of every step.

    Raises:
        ModelError: it cannot be served, or not rightly; a sentence says why.
    """
    config = _load_config(folder)
    _check_rope(config, length)
    _log.info("transformers loads the weights")
    model = _load_model(config, weights, dtype).to(device).eval()
    try:
        expected = Expected.of(model)
        adapted = AdaptedModel(_shape(config), model, kernels, progress)
        check(adapted, expected)
    except ModelError as error:
        raise ModelError(f"A {config.model_type} model cannot be served: {error}") from error
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"A {config.model_type} model cannot be served: it fails on packed sequences with "
            f"{type(error).__name__}, {_first_line(error)}"
        ) from error
    return adapted


def _load_config(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (KeyError, OSError, StrictDataclassError, TypeError, ValueError) as error:
        raise ModelError(f"transformers does not know this model: {_first_line(error)}") from error


def _shape(config: PretrainedConfig) -> ModelShape:
    heads, hidden = _required(config, "num_attention_heads"), _required(config, "hidden_size")
    dtype = getattr(config, "dtype", None)
    return ModelShape(
        vocab_size=_required(config, "vocab_size"),
        layers=_required(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        windows=_windows(config),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
    )


def _required(config: PretrainedConfig, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ModelError(
            f"A {config.model_type} model cannot be served: its {name} is {value!r}, not "
            "one number for all of its layers."
        )
    return value


def _windows(config: PretrainedConfig) -> tuple[int, ...]:
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * _required(config, "num_hidden_layers")
    if unknown := sorted(set(kinds) - _LAYER_TYPES):
        raise ModelError(
            f"A {config.model_type} model cannot be served: it has layers of {', '.join(unknown)}, "
            "which keep no pages of keys and values."
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _check_rope(config: PretrainedConfig, length: int) -> None:
    """LongRoPE turns all rows of a batch by other angles as soon as one of them is long."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and each.get("rope_type") == "longrope":
            possible = each["original_max_position_embeddings"]
            if length > possible:
                raise ModelError(
                    f"With longrope, sequences beyond {possible} tokens would change the others of "
                    f"their batch; set --max-model-len {possible} or less."
                )


def _load_model(config: PretrainedConfig, weights: Weights, dtype: torch.dtype) -> PreTrainedModel:
    if weights.kind != "safetensors":
        raise ModelError(
            f"A {config.model_type} model can be served from safetensors only: prepare it from "
            "its folder in Hugging Face's layout."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"The weights are quantized, and transformers computes a {config.model_type} model, "
            "from weights of 16 or 32 bits: quantized ones are served of the architectures "
            f"{', '.join(ARCHITECTURES)}."
        )
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            Path(weights.paths[0]).parent,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"transformers cannot load the weights: {_first_line(error)}") from error
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"The weights lack the tensor {missing[0]!r} that the config asks for, "
            f"and {len(missing) - 1} others."
        )
    return model


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
