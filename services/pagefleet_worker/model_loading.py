"""From a prepared model to what computes it: this project's decoder, or transformers' model."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pagefleet.manifest import Manifest
from pagefleet.settings import WorkerSettings
from pagefleet_kernels.dispatch import Kernels
from pagefleet_worker.model.config import ARCHITECTURES, DecoderConfig, load_config
from pagefleet_worker.model.decoder import Decoder
from pagefleet_worker.model.lora import read_adapter
from pagefleet_worker.model.ranks import ALONE, Ranks
from pagefleet_worker.model.weights import (
    INT8,
    OWN,
    OWN_OR_INT8,
    PLAIN,
    Quantization,
    load_weights,
)
from pagefleet_worker.model_files import ModelError, check_unchanged
from pagefleet_worker.paging.causal_model import CausalModel, ModelShape

_log = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_LEAST_CAPABILITY = (8, 0)
"""Of a GPU: older ones compute no bfloat16, and have less shared memory than the tiles take."""


@dataclass(frozen=True)
class Means:
    """What a model is computed with."""

    device: torch.device
    kernels: Kernels
    positions: int
    """That a sequence may have."""
    progress: Callable[[], None]
    """Called at every layer, and while weights are read."""
    ranks: Ranks = ALONE


def load_model(
    folder: Path, manifest: Manifest, settings: WorkerSettings, means: Means
) -> CausalModel:
    """The decoder of this project where it knows the architecture, or transformers' model.

    Raises:
        ModelError: neither computes it, or not with these settings; or its files have changed.
    """
    _check_adapters(manifest)
    check_unchanged(folder, manifest)
    if manifest.architecture in ARCHITECTURES:
        return _load_decoder(manifest, load_config(folder), settings, means)
    device, kernels = means.device, means.kernels
    if settings.quantization not in ("auto", "none"):
        raise ModelError(
            f"--quantization does not work for {manifest.architecture} models yet; leave it out."
        )
    if settings.batch_invariant and device.type == "cuda":
        raise ModelError(
            f"transformers computes the layers of a {manifest.architecture} model, and on a "
            "GPU not the same for a row in every batch: leave out --batch-invariant."
        )
    from pagefleet_worker.adapter.loading import load_adapted, load_shape

    config = load_shape(folder)
    dtype = choose_dtype(settings.dtype, config, device)
    kernels.warm_up(dtype, dtype, config.heads, config.kv_heads, config.head_dim)
    return load_adapted(
        folder, manifest.weights, dtype, device, kernels, means.positions, means.progress
    )


def _load_decoder(
    manifest: Manifest, config: DecoderConfig, settings: WorkerSettings, means: Means
) -> Decoder:
    device, ranks = means.device, means.ranks

    def advance(loaded: int, total: int) -> None:
        means.progress()
        if loaded * 4 // total > (loaded - 1) * 4 // total:
            _log.info("%s: %d %% of the weights are loaded", manifest.name, 100 * loaded // total)
        if loaded == total and device.type == "cpu":
            _log.info("kernels that are new to this machine are compiled now, which takes seconds")

    config = config.within(means.positions)
    own = ranks.share.of(config)
    dtype = choose_dtype(settings.dtype, config, device)
    unable = None
    if device.type == "cpu" and dtype is torch.float16:
        unable = "a CPU with --dtype float16"
    quantization = choose_quantization(settings.quantization, manifest.weights.kind, unable)
    quantization = quantization.within(means.kernels.kinds)
    files, share = manifest.weights, ranks.share
    weights = load_weights(files, config, dtype, device, advance, quantization, share)
    adapters = [read_adapter(Path(each.folder), config) for each in manifest.adapters]
    changes = [each.layers(config, dtype, device, share) for each in adapters]
    return Decoder(own, weights, means.kernels, means.positions, means.progress, ranks, changes)


def _check_adapters(manifest: Manifest) -> None:
    if manifest.adapters and manifest.architecture not in ARCHITECTURES:
        raise ModelError(
            f"LoRA adapters are there for the architectures {', '.join(ARCHITECTURES)}, not for "
            f"{manifest.architecture}: leave out --lora-modules, or merge one into the model."
        )


def choose_device(name: str) -> torch.device:
    """That of the settings.

    Raises:
        ModelError: it is not there, or too old.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ModelError(f"There is no device {name!r}; a worker's --device is auto, cpu or cuda.")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("There is no CUDA device that torch can use; try --device cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ModelError(f"There is no {name}: torch sees {count} CUDA devices, from cuda:0 on.")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        raise ModelError(
            f"{torch.cuda.get_device_name(device)} is too old for these kernels: they need compute "
            "capability 8.0 (Ampere) or newer. Try --device cpu."
        )
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else device


def choose_dtype(name: str, config: ModelShape, device: torch.device) -> torch.dtype:
    """What the settings say; else the fastest of a CPU, or on a GPU the 16 bits that the weights
    were saved in: float32 is for whoever asks for it, no matrix unit computes it.
    """
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        fast = any(able.get(feature) for feature in ("avx512_bf16", "amx_bf16"))
        return torch.bfloat16 if fast else torch.float32
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def choose_quantization(name: str, kind: str, unable: str | None = None) -> Quantization:
    """What the settings say of matrices from files of this kind; `unable`: what it is, if that is
    so, that does not multiply quantized ones.

    By default matrices are computed with as a quantized checkpoint has them. Those of a .gguf file
    are widened, which loses nothing of any of their kinds; the kernels take some of these as they
    are, with activations that a CPU rounds to eight bits.

    Raises:
        ModelError: it is for other files, or the kernels are not able.
    """
    if name == "auto":
        return OWN if kind == "safetensors" and unable is None else PLAIN
    if name == "gguf" and kind != "gguf":
        raise ModelError("--quantization gguf takes a .gguf file; try --quantization int8.")
    if name != "none" and unable is not None:
        raise ModelError(
            f"There are no products for --quantization {name} on {unable}; leave out one of them."
        )
    return {"none": PLAIN, "int8": INT8, "gguf": OWN_OR_INT8}[name]
