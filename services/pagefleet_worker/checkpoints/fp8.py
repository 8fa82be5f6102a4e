"""Checkpoints in floats of 8 bits (e4m3; Micikevicius et al., "FP8 formats for deep learning",
2022): those that transformers calls `fp8`, with a scale for each block of 128 x 128 weights as
DeepSeek-V3 introduced them, or for all of a matrix, and those of `fbgemm_fp8`, with one for each
output.

Of a layer there are `weight` [outputs, inputs] and `weight_scale_inv`, or `weight_scale`; both are
what a number is multiplied by. Scales of activations are for products in 8 bits, and not read.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from pagefleet_worker.checkpoints.safetensors_files import FLOATS, TensorFiles
from pagefleet_worker.checkpoints.stored_matrix import Scaled, converted
from pagefleet_worker.model_files import ModelError

_SCALES = ("weight_scale_inv", "weight_scale")
_NUMBERS = (torch.float8_e4m3fn,)
_SCALE_TYPES = (*FLOATS, torch.float8_e8m0fnu)


class _Config(msgspec.Struct, frozen=True):
    weight_block_size: tuple[int, int] | None = None


class Fp8:
    """A checkpoint whose blocks, where a matrix is cut into such, have [outputs, inputs] of
    `block`.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.block = converted(dict(values), _Config).weight_block_size

    def matrix(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> Scaled | None:
        """See `Format`."""
        for name in _SCALES:
            if f"{module}.{name}" in tensors:
                return scaled(tensors, module, name, shape, self.block)
        return None


def scaled(
    tensors: TensorFiles,
    module: str,
    scale: str,
    shape: tuple[int, int],
    block: Sequence[int] | None,
) -> Scaled:
    """The matrix of `module` over the scales of that name.

    Raises:
        ModelError: they do not fit each other.
    """
    name = f"{module}.{scale}"
    numbers = tensors.read(f"{module}.weight", shape, _NUMBERS)
    found = tensors.shape(name)
    scales = tensors.read(name, found, _SCALE_TYPES).float()
    height, width = scale_block(name, found, shape, block)
    return Scaled(numbers, scales.view(-(-shape[0] // height), -1), (height, width))


def scale_block(
    name: str, found: Sequence[int], shape: tuple[int, int], block: Sequence[int] | None
) -> tuple[int, int]:
    """What each scale is for: outputs and inputs, by the shape `found` of the scales.

    Raises:
        ModelError: they are for no such matrix.
    """
    outputs, inputs = shape
    if list(found) in ([], [1], [1, 1]):
        return outputs, inputs
    if list(found) in ([outputs], [outputs, 1]):
        return 1, inputs
    if len(found) == 2 and found[0] == outputs and found[1] and inputs % found[1] == 0:
        return 1, inputs // found[1]
    if block is not None and min(block) > 0:
        height, width = block
        if list(found) == [-(-outputs // height), -(-inputs // width)]:
            return height, width
    raise ModelError(
        f"The tensor {name!r} has the shape {list(found)}: no scales of a matrix of "
        f"{list(shape)}" + ("." if block is None else f" in blocks of {list(block)}.")
    )
