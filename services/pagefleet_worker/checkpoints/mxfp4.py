"""Checkpoints whose experts are in floats of four bits (MXFP4; Open Compute Project, "OCP
microscaling formats (MX) specification", version 1.0, 2023, section 5), as those of gpt-oss are.

Of a matrix of an expert there are, by the names that `expert_names` gives them,

    blocks    uint8 [outputs, groups, 16], two numbers each, the first below: e2m1
    scales    uint8 [outputs, groups], e: the group's numbers are multiplied by 2 ** (e - 127)

All others are plain, which is told by the tensors that are there.
"""

from collections.abc import Mapping
from typing import Any

import torch

from pagefleet_kernels.quantized import GROUP
from pagefleet_worker.checkpoints.safetensors_files import TensorFiles
from pagefleet_worker.checkpoints.stored_matrix import Micro, unpacked
from pagefleet_worker.model_files import ModelError

_BYTES = (torch.uint8,)


class Mxfp4:
    """Such a checkpoint; there are no kinds of it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Nothing of the config is needed."""

    def matrix(self, tensors: TensorFiles, module: str, shape: tuple[int, int]) -> Micro | None:
        """See `Format`."""
        if f"{module}.blocks" not in tensors:
            return None
        outputs, inputs = shape
        if inputs % GROUP:
            raise ModelError(
                f"The matrix {module!r} has {inputs} inputs, no multiple of {GROUP}, and MXFP4 has "
                "whole groups only: the config is malformed."
            )
        groups = inputs // GROUP
        blocks = tensors.read(f"{module}.blocks", (outputs, groups, GROUP // 2), _BYTES)
        scales = tensors.read(f"{module}.scales", (outputs, groups), _BYTES)
        return Micro(unpacked(blocks.flatten(1), 4), scales)
