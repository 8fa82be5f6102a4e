"""Weights in a GGUF file (ggml, docs/gguf.md), dequantized as they are copied.

GGUF stores the query and key rows of the `llama` architecture in the order of the original rotary
embedding, which turns neighbouring dimensions (2i, 2i + 1) of a head; the decoder's turns
(i, i + D/2), so those rows are put back.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from pagefleet_worker.model_files import ModelError

_READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

_PIECE_ELEMENTS = 1 << 22
"""Elements dequantized at a time: 16 MiB of float32."""


class GgufSource:
    """One GGUF file."""

    def __init__(self, path: Path, heads: int, kv_heads: int) -> None:
        reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = reader.fields["general.architecture"].contents()
        self._interleaved = {"attn_q": heads, "attn_k": kv_heads} if architecture == "llama" else {}

    def copy(self, name: str, target: Tensor) -> None:
        """Fill `target` with the tensor of this name in Hugging Face's terms; see `Source`."""
        module, kind = name.rsplit(".", 1)
        prefix = ""
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            prefix = f"blk.{layer}."
        stored = f"{prefix}{_MODULES[module]}.{kind}"
        tensor = self._tensors.get(stored)
        if tensor is None:
            raise ModelError(f"The weights lack the tensor {stored!r} that the config asks for.")
        _check(stored, tensor, target)
        heads = self._interleaved.get(_MODULES[module])
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
