"""Weights in a GGUF file (ggml, docs/gguf.md), dequantized as they are copied, or as they are.

GGUF stores the query and key rows of Llama and its like in the order of the original rotary
embedding, which turns neighbouring dimensions (2i, 2i + 1) of a head; the decoder's turns
(i, i + D/2), so those rows are put back.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_kernels.quantized import Quantized
from pagefleet_worker.checkpoints.gguf_file import GgufTensor, read_gguf_parts
from pagefleet_worker.checkpoints.k_quants import K_QUANTS, quantized_q4_k
from pagefleet_worker.checkpoints.stored_matrix import Micro
from pagefleet_worker.model.config import DecoderConfig
from pagefleet_worker.model.shares import Cut, put_part
from pagefleet_worker.model_files import ModelError

_GROUPED = ("Q8_0", "Q4_0", "Q4_1")
"""Kinds whose blocks are groups of a `Quantized`."""

_RARE = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")
"""Kinds that the `gguf` package dequantizes, more slowly than the others are here."""

_READABLE = ("F32", "F16", "BF16", *_GROUPED, "MXFP4", *K_QUANTS, *_RARE)

_ARCHITECTURES = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}

_INTERLEAVED = ("llama", "smollm3", "granite")
"""Architectures whose queries and keys are in the order of the original rotary embedding."""

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""Which expert a matrix is of: those of a layer are one tensor."""

_PIECE_ELEMENTS = 1 << 20
"""Elements dequantized at a time: 4 MiB of float32, which stay in caches between operations."""


class GgufSource:
    """A GGUF file, or all parts of one."""

    norm_offset = 0.0
    """It is added when a model is converted."""

    def __init__(self, paths: Sequence[Path], config: DecoderConfig) -> None:
        file = read_gguf_parts(paths)
        self._tensors = file.tensors
        architecture = file.metadata["general.architecture"]
        if architecture not in _ARCHITECTURES:
            raise ModelError(f"The GGUF architecture {architecture!r} is unknown.")
        self._names = get_tensor_name_map(_ARCHITECTURES[architecture], config.layers)
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}
        self._interleaved = heads if architecture in _INTERLEAVED else {}

    def copy(self, name: str, target: Tensor, cuts: Sequence[Cut]) -> None:
        """Fill `target` from the tensor of this name in Hugging Face's terms; see `Source`."""
        shape = torch.Size(cut.whole for cut in cuts)
        is_whole = target.shape == shape
        whole = target if is_whole else torch.empty(shape, dtype=target.dtype)
        _dequantize_into(whole, self._find(name, shape), self._order(name, shape[0]))
        if not is_whole:
            put_part(target, whole, cuts)

    def quantized(self, name: str, shape: Sequence[int]) -> Quantized | None:
        """The matrix of this name as the file has it; see `Source`."""
        tensor = self._find(name, shape)
        if tensor.kind.name == "Q4_K":
            matrix = quantized_q4_k(torch.from_numpy(tensor.data.copy()))
        elif tensor.kind.name in _GROUPED:
            matrix = _matrix(tensor.data, tensor.kind.name)
        elif tensor.kind.name == "MXFP4" and (held := _micro(tensor.data).quantized()):
            matrix = held
        else:
            return None
        order = self._order(name, shape[0])
        return matrix if order is None else matrix.rows(order.argsort())

    def _find(self, name: str, shape: Sequence[int]) -> GgufTensor:
        expert = _EXPERT.search(name)
        whole = name if expert is None else _EXPERT.sub(".experts.", name)
        whole = whole.replace("correction_bias", "correction.bias")
        stored = self._names.get_name(whole, try_suffixes=(".weight", ".bias"))
        tensor = self._tensors.get(stored) or self._tensors.get(f"{stored}.weight")
        if tensor is not None and expert is not None:
            tensor = tensor.part(int(expert[1]))
        if tensor is None:
            raise ModelError(f"The weights lack the tensor {name!r} that the config asks for.")
        if tuple(shape) == (1, *tensor.shape):
            tensor = tensor.as_row()
        _check(stored, tensor, shape)
        return tensor

    def _order(self, name: str, rows: int) -> Tensor | None:
        """Where each stored row belongs: int64 [rows]; None if they lie as they should."""
        heads = self._interleaved.get(name.split(".")[-2])
        if heads is None:
            return None
        return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


def _check(name: str, tensor: GgufTensor, wanted: Sequence[int]) -> None:
    if tensor.kind.name not in _READABLE:
        raise ModelError(
            f"The tensor {name!r} is quantized as {tensor.kind.name}; readable are "
            f"{', '.join(_READABLE)}."
        )
    if tensor.shape != tuple(wanted):
        raise ModelError(
            f"The tensor {name!r} has the shape {list(tensor.shape)}, but the config says "
            f"{list(wanted)}."
        )


def _matrix(stored: NDArray[np.uint8], kind: str) -> Quantized:
    """Rows of blocks (ggml, ggml-common.h: `block_q8_0`, `block_q4_0`, `block_q4_1`)."""
    size, factors = {"Q8_0": (34, 1), "Q4_0": (18, 1), "Q4_1": (20, 2)}[kind]
    blocks = torch.from_numpy(stored.reshape(len(stored), -1, size).copy())
    heads, numbers = blocks[..., : 2 * factors], blocks[..., 2 * factors :]
    scales = heads.contiguous().view(torch.float16)
    if kind == "Q8_0":
        return Quantized(numbers.flatten(1) ^ 0x80, scales[..., 0])
    numbers = torch.cat((numbers & 15, numbers >> 4), dim=-1)
    minimums = scales[..., 1] if kind == "Q4_1" else -8 * scales[..., 0]
    return Quantized(numbers.flatten(1), scales[..., 0], minimums)


def _micro(stored: NDArray[np.uint8]) -> Micro:
    """Rows of blocks (`block_mxfp4`): an exponent, and two numbers a byte, which are half a group
    apart.
    """
    blocks = torch.from_numpy(stored.reshape(len(stored), -1, 17).copy())
    numbers = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=-1)
    return Micro(numbers.flatten(1), blocks[..., 0])


def _dequantize(stored: NDArray[Any], kind: GGMLQuantizationType) -> Tensor:
    """Stored rows as they are used: float32, or the file's own float type."""
    if kind.name in _GROUPED:
        return _matrix(stored, kind.name).dequantized()
    if kind.name == "MXFP4":
        return _micro(stored).dequantized()
    if kind.name in _RARE:
        return torch.from_numpy(dequantize(stored, kind))
    rows = torch.from_numpy(stored.copy())
    if kind.name in K_QUANTS:
        return K_QUANTS[kind.name](rows)
    return rows.view(torch.bfloat16) if kind.name == "BF16" else rows


def _dequantize_into(target: Tensor, tensor: GgufTensor, order: Tensor | None) -> None:
    rows = target.shape[0]
    step = max(1, _PIECE_ELEMENTS * rows // target.numel())

    def fill(first: int) -> None:
        values = _dequantize(tensor.data[first : first + step], tensor.kind)
        piece = values.to(target.device, target.dtype)
        if order is None:
            target[first : first + step] = piece
        else:
            target[order[first : first + step].to(target.device)] = piece

    _on_all_threads(fill, range(0, rows, step))


def _on_all_threads(work: Callable[[int], None], pieces: Sequence[int]) -> None:
    """Do the pieces on as many threads as torch has, each piece on one.

    Threads that share an operation wait for each other at its end, and there are thousands: beside
    two busy neighbours on two cores that took three times as long.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(
            min(threads, len(pieces)), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            deque(pool.map(work, pieces), maxlen=0)
    finally:
        torch.set_num_threads(threads)
