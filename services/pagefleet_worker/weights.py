"""From weight files to the decoder's tensors: fused, in the serving dtype, on the device.

`Fused` says which tensors of a file, stacked along their rows, make one of the decoder's, and one
table of them drives the loader. Every target is made once and filled piece by piece, straight from
the memory-mapped file, so that the model is never held twice. Names are those of Hugging Face's
Llama family; a source of another naming translates. Pickled weights are never read.
"""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pagefleet.manifest import Weights
from pagefleet_worker.config import DecoderConfig
from pagefleet_worker.gguf_weights import GgufSource
from pagefleet_worker.model_files import ModelError

_log = logging.getLogger(__name__)

_READABLE = (torch.float32, torch.bfloat16, torch.float16)

Progress = Callable[[int, int], None]
"""Told how many of how many tensors are loaded."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, matrices as [outputs, inputs]."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """A whole decoder; `head` is `embedding` itself where the model ties them.

    Layers are read when they are taken, once: whoever makes something else of each never holds
    the model twice.
    """

    embedding: Tensor
    layers: Iterable[LayerWeights]
    norm: Tensor
    head: Tensor


class Source(Protocol):
    """Weight files that know their tensors by name."""

    def copy(self, name: str, target: Tensor) -> None:
        """Fill `target`, of any floating dtype and device, with the tensor `name`.

        Raises:
            ModelError: there is none, or it has another shape.
        """
        ...


@dataclass(frozen=True)
class Fused:
    """A tensor of the decoder: parts (name, rows), stacked; without `columns` it is a vector."""

    parts: tuple[tuple[str, int], ...]
    columns: int | None = None

    def load(self, source: Source, prefix: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make the tensor and fill it."""
        sizes = [rows for _, rows in self.parts]
        shape = [sum(sizes)] if self.columns is None else [sum(sizes), self.columns]
        tensor = torch.empty(shape, dtype=dtype, device=device)
        for (name, _), part in zip(self.parts, torch.split(tensor, sizes), strict=True):
            source.copy(prefix + name, part)
        return tensor


def load_weights(
    files: Weights,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    cache: Path | None = None,
) -> DecoderWeights:
    """Load the weights of a prepared model; taking the layers from what is returned loads them.

    Dequantized GGUF files are kept in the folder `cache`, if there is one: to read them again is
    ten times as fast.

    Raises:
        ModelError: the files do not hold what the config says; the layers raise it too.
    """
    outer, inner = _outer_tensors(config), _layer_tensors(config)
    source = _open(files, config, dtype, cache)
    loaded, total = 0, len(outer) + config.layers * len(inner)

    def load(tensors: dict[str, Fused], prefix: str) -> dict[str, Any]:
        nonlocal loaded
        made = {}
        for field, fused in tensors.items():
            made[field] = fused.load(source, prefix, dtype, device)
            loaded += 1
            progress(loaded, total)
        return made

    rest = load(outer, "")
    layers = (
        LayerWeights(**load(inner, f"model.layers.{index}.")) for index in range(config.layers)
    )
    return DecoderWeights(layers=layers, **{"head": rest["embedding"], **rest})


def _outer_tensors(config: DecoderConfig) -> dict[str, Fused]:
    vocabulary, hidden = config.vocab_size, config.hidden_size
    tensors = {
        "embedding": Fused((("model.embed_tokens.weight", vocabulary),), hidden),
        "norm": Fused((("model.norm.weight", hidden),)),
    }
    if not config.tied_embeddings:
        tensors["head"] = Fused((("lm_head.weight", vocabulary),), hidden)
    return tensors


def _layer_tensors(config: DecoderConfig) -> dict[str, Fused]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.query_size, config.kv_size
    matrices = {
        "qkv": ((("q_proj", query), ("k_proj", kv), ("v_proj", kv)), hidden, config.qkv_bias),
        "output": ((("o_proj", hidden),), query, config.output_bias),
        "gate_up": ((("gate_proj", inner), ("up_proj", inner)), hidden, config.mlp_bias),
        "down": ((("down_proj", hidden),), inner, config.mlp_bias),
    }
    norms = [("attention_norm", "input_layernorm", hidden)]
    norms += [("mlp_norm", "post_attention_layernorm", hidden)]
    if config.qk_norm:
        norms += [("query_norm", "self_attn.q_norm", config.head_dim)]
        norms += [("key_norm", "self_attn.k_norm", config.head_dim)]
    tensors = {field: Fused(((f"{name}.weight", size),)) for field, name, size in norms}
    for field, (parts, columns, bias) in matrices.items():
        module = "self_attn" if field in ("qkv", "output") else "mlp"
        named = [(f"{module}.{name}", rows) for name, rows in parts]
        tensors[field] = Fused(tuple((f"{name}.weight", rows) for name, rows in named), columns)
        if bias:
            tensors[f"{field}_bias"] = Fused(tuple((f"{name}.bias", rows) for name, rows in named))
    return tensors


def _open(files: Weights, config: DecoderConfig, dtype: torch.dtype, cache: Path | None) -> Source:
    if files.kind == "safetensors":
        return SafetensorsSource(files.paths)
    if files.kind == "gguf":
        path = Path(files.paths[0])
        if cache is None:
            return GgufSource(path, config)
        return _dequantized(path, config, dtype, cache)
    raise ModelError("This model has no weights: it runs with --engine echo or --engine sim.")


def _dequantized(gguf: Path, config: DecoderConfig, dtype: torch.dtype, cache: Path) -> Source:
    """The same tensors in `dtype`, from a file in `cache` that is made unless it is there."""
    path = cache / f"dequantized-{str(dtype).removeprefix('torch.')}.safetensors"
    if not path.exists():
        source, made = GgufSource(gguf, config), path.with_name(f".{os.getpid()}-{path.name}")
        try:
            save_file(_parts(source, config, dtype), made)
            made.replace(path)
        except (OSError, SafetensorError) as error:
            made.unlink(missing_ok=True)
            _log.warning("dequantized weights are not kept for the next start: %s", error)
            return source
    return SafetensorsSource((str(path),))


def _parts(source: Source, config: DecoderConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of a model by its name, none of them fused."""
    tables = {f"model.layers.{index}.": _layer_tensors(config) for index in range(config.layers)}
    made = {}
    for prefix, tensors in {"": _outer_tensors(config), **tables}.items():
        for fused in tensors.values():
            for name, rows in fused.parts:
                shape = [rows] if fused.columns is None else [rows, fused.columns]
                made[prefix + name] = torch.empty(shape, dtype=dtype)
                source.copy(prefix + name, made[prefix + name])
    return made


class SafetensorsSource:
    """Any number of safetensors files that hold one model."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def copy(self, name: str, target: Tensor) -> None:
        """Fill `target` with the tensor `name`; see `Source`."""
        if name not in self._files:
            raise ModelError(f"The weights lack the tensor {name!r} that the config asks for.")
        tensor = self._files[name].get_tensor(name)
        if tensor.dtype not in _READABLE:
            raise ModelError(f"The tensor {name!r} is {tensor.dtype}: quantized, unsupported.")
        if tensor.shape != target.shape:
            raise ModelError(
                f"The tensor {name!r} has the shape {list(tensor.shape)}, but the config "
                f"says {list(target.shape)}."
            )
        target.copy_(tensor)
