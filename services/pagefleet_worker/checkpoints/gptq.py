"""Checkpoints of GPTQ (Frantar et al., "GPTQ", ICLR 2023) as AutoGPTQ and GPTQModel write them.

Of a layer with [inputs, outputs] there are, with P = 32 / bits numbers in a word:

    qweight  int32 [inputs / P, outputs], P inputs in a word
    qzeros   int32 [groups, outputs / P], P outputs in a word
    scales   float [groups, outputs]
    g_idx    int32 [inputs], the group of each input

In the first version of the format qzeros are too small by one, modulo 2 ** bits; in the second
(`gptq_v2`) they are what they are. With `desc_act` a group's inputs may lie anywhere: no kernel
here follows them, so that such a matrix is widened.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from pagefleet_worker.checkpoints.safetensors_files import TensorFiles
from pagefleet_worker.checkpoints.stored_matrix import (
    Grouped,
    check_bits,
    converted,
    order_of,
    unpacked,
)
from pagefleet_worker.model_files import ModelError

_INTS = (torch.int32,)
_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""What zero points lack, by the version of the format."""


class _Config(msgspec.Struct, frozen=True):
    bits: int
    checkpoint_format: str | None = None
    format: str | None = None
    pack_dtype: str = "int32"


class Gptq:
    """A checkpoint whose zero points are too small by `offset`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        config = converted(dict(values), _Config)
        named = config.checkpoint_format or config.format or "gptq"
        if named not in _OFFSETS or config.pack_dtype != "int32":
            raise ModelError(
                f"The weights are quantized by GPTQ in the layout {named!r}, in words of "
                f"{config.pack_dtype}, which is not supported; {' and '.join(_OFFSETS)} in words "
                "of int32 are."
            )
        check_bits("GPTQ", config.bits)
        self.offset = _OFFSETS[named]

    def matrix(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> Grouped | None:
        """See `Format`. A layer may have another width than the config says (`dynamic`)."""
        if f"{module}.qweight" not in tensors:
            return None
        outputs, inputs = shape
        bits = round(32 * tensors.shape(f"{module}.qweight", 2)[0] / inputs)
        check_bits(f"GPTQ ({module})", bits)
        per_word, groups = 32 // bits, tensors.shape(f"{module}.scales", 2)[0]
        words = tensors.read(f"{module}.qweight", (inputs // per_word, outputs), _INTS)
        stored = tensors.read(f"{module}.qzeros", (groups, outputs // per_word), _INTS)
        scales = tensors.read(f"{module}.scales", (groups, outputs))
        zeros = (unpacked(stored, bits).int() + self.offset) % 2**bits
        return Grouped(
            unpacked(words.T, bits),
            scales.T.contiguous(),
            zeros.T.contiguous(),
            bits,
            _groups(tensors, module, inputs, groups),
        )


def _groups(tensors: TensorFiles, module: str, inputs: int, groups: int) -> Tensor | None:
    """The group of each input; None if they lie one after another. (Zeros are what some leave
    there then.)
    """
    name = f"{module}.g_idx"
    if name in tensors:
        found = tensors.read(name, (inputs,), _INTS).long()
        if found.any() or groups == 1:
            return order_of(found, name, groups)
    if not groups or inputs % groups:
        raise ModelError(f"{inputs} inputs of {module} do not fall into {groups} even groups.")
    return None
