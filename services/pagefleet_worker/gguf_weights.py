"""Weights in a GGUF file (ggml, docs/gguf.md), dequantized as they are copied.

GGUF stores the query and key rows of the `llama` architecture in the order of the original rotary
embedding, which turns neighbouring dimensions (2i, 2i + 1) of a head; the decoder's turns
(i, i + D/2), so those rows are put back.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from torch import Tensor

from pagefleet_worker.config import DecoderConfig
from pagefleet_worker.model_files import ModelError

_READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

_ARCHITECTURES = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}

_PIECE_ELEMENTS = 1 << 22
"""Elements dequantized at a time: 16 MiB of float32."""


class GgufSource:
    """One GGUF file."""

    def __init__(self, path: Path, config: DecoderConfig) -> None:
        reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = reader.fields["general.architecture"].contents()
        if architecture not in _ARCHITECTURES:
            raise ModelError(f"The GGUF architecture {architecture!r} is unknown.")
        self._names = get_tensor_name_map(_ARCHITECTURES[architecture], config.layers)
        self._interleaved = (
            {"q_proj": config.heads, "k_proj": config.kv_heads} if architecture == "llama" else {}
        )

    def copy(self, name: str, target: Tensor) -> None:
        """Fill `target` with the tensor of this name in Hugging Face's terms; see `Source`."""
        stored = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = self._tensors.get(stored)
        if tensor is None:
            raise ModelError(f"The weights lack the tensor {name!r} that the config asks for.")
        _check(stored, tensor, target)
        heads = self._interleaved.get(name.split(".")[-2])
        order = None if heads is None else _row_order(heads, target.shape[0])
        _dequantize_into(target, tensor, order)


def _check(name: str, tensor: Any, target: Tensor) -> None:
    kind = GGMLQuantizationType(tensor.tensor_type).name
    if kind not in _READABLE:
        raise ModelError(
            f"The tensor {name!r} is quantized as {kind}; readable are {', '.join(_READABLE)}."
        )
    shape = [int(size) for size in reversed(tensor.shape)]
    if shape != list(target.shape):
        raise ModelError(
            f"The tensor {name!r} has the shape {shape}, but the config says {list(target.shape)}."
        )


def _row_order(heads: int, rows: int) -> Tensor:
    """Where each stored row belongs: int64 [rows]."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


def _dequantize_into(target: Tensor, tensor: Any, order: Tensor | None) -> None:
    rows = target.shape[0]
    step = max(1, _PIECE_ELEMENTS * rows // target.numel())
    for first in range(0, rows, step):
        stored = tensor.data[first : first + step]
        values = np.require(dequantize(stored, tensor.tensor_type), np.float32, "W")
        piece = torch.from_numpy(values).to(target.device, target.dtype)
        if order is None:
            target[first : first + step] = piece
        else:
            target[order[first : first + step].to(target.device)] = piece
