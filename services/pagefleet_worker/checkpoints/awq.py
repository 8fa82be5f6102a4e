"""Checkpoints of AWQ (Lin et al., "AWQ", MLSys 2024) as AutoAWQ writes them, in its GEMM layout.

Of a layer with [inputs, outputs] there are

    qweight  int32 [inputs, outputs / 8]
    qzeros   int32 [groups, outputs / 8]
    scales   float16 [groups, outputs]

and the nibbles of a word, from the lowest, belong to its even outputs, then to its odd ones.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from pagefleet_worker.checkpoints.safetensors_files import TensorFiles
from pagefleet_worker.checkpoints.stored_matrix import Grouped, check_bits, converted, unpacked
from pagefleet_worker.model_files import ModelError

_INTS = (torch.int32,)
_BITS = 4
_PER_WORD = 32 // _BITS


class _Config(msgspec.Struct, frozen=True):
    bits: int | None = None
    w_bit: int = _BITS
    group_size: int | None = None
    q_group_size: int = 128
    version: str | None = None
    format: str = "gemm"


class Awq:
    """A checkpoint whose groups have `size` inputs; -1 if each output has one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        config = converted(dict(values), _Config)
        layout = (config.version or config.format).lower()
        if layout != "gemm":
            raise ModelError(
                f"The weights are quantized by AWQ in the layout {layout!r}, which is not "
                "supported; 'gemm' is."
            )
        check_bits("AWQ", config.bits or config.w_bit, (_BITS,))
        self.size = config.group_size or config.q_group_size

    def matrix(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> Grouped | None:
        """See `Format`."""
        if f"{module}.qweight" not in tensors:
            return None
        outputs, inputs = shape
        size = inputs if self.size == -1 else self.size
        if size < 1 or inputs % size:
            raise ModelError(f"{inputs} inputs of {module} do not fall into groups of {size}.")
        groups, words = inputs // size, outputs // _PER_WORD
        numbers = tensors.read(f"{module}.qweight", (inputs, words), _INTS)
        zeros = tensors.read(f"{module}.qzeros", (groups, words), _INTS)
        scales = tensors.read(f"{module}.scales", (groups, outputs))
        return Grouped(
            _in_order(numbers).T.contiguous(),
            scales.T.contiguous(),
            _in_order(zeros).T.contiguous().int(),
            _BITS,
        )


def _in_order(words: Tensor) -> Tensor:
    """[rows, words] -> uint8 [rows, outputs]"""
    halves = unpacked(words, _BITS).view(len(words), -1, 2, _PER_WORD // 2)
    return halves.transpose(2, 3).flatten(1)
