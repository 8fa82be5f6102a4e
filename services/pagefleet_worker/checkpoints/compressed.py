"""Checkpoints of compressed-tensors, which llm-compressor writes.

Of a layer with [outputs, inputs] there are, for integers of B bits in two's complement,

    weight_packed      int32 [outputs, inputs * B / 32], each number with 2 ** (B - 1) added
                       (`pack-quantized`), or
    weight             int8 [outputs, inputs]  (`int-quantized`, `naive-quantized`)
    weight_zero_point  where it is not 0 everywhere: of the scales' shape as int8, or packed too,
                       [outputs * B / 32, groups]
    weight_g_idx       where groups do not lie one after another: int32 [inputs], or -1

and for floats `weight` in e4m3. `weight_scale` is [outputs, groups], [outputs, 1], or one number;
with floats there may be one for each block. Which numbers a layer has is told by its tensors. How
activations were to be rounded is not read: they are not, or as `Quantized` says.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from pagefleet_worker.checkpoints.fp8 import scale_block, scaled
from pagefleet_worker.checkpoints.safetensors_files import FLOATS, TensorFiles
from pagefleet_worker.checkpoints.stored_matrix import (
    Grouped,
    StoredMatrix,
    check_bits,
    converted,
    order_of,
    unpacked,
)
from pagefleet_worker.model_files import ModelError

_LAYOUTS = ("dense", "pack-quantized", "naive-quantized", "int-quantized", "float-quantized")
_MIXED = "mixed-precision"


class _Numbers(msgspec.Struct, frozen=True):
    num_bits: int = 8
    type: str = "int"
    block_structure: tuple[int, int] | None = None


class _Scheme(msgspec.Struct, frozen=True):
    weights: _Numbers | None = None
    format: str | None = None


class _Config(msgspec.Struct, frozen=True):
    config_groups: dict[str, _Scheme] = {}
    format: str = "dense"
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


class CompressedTensors:
    """A checkpoint whose blocks, where floats have such, have [outputs, inputs] of `block`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        config = converted(dict(values), _Config)
        schemes = config.config_groups.values()
        _check_layouts({each.format or config.format for each in schemes} | {config.format})
        sparsity = (config.sparsity_config or {}).get("format", "dense")
        if sparsity != "dense":
            raise ModelError(f"The weights are stored as {sparsity!r}, which is not supported.")
        if (config.transform_config or {}).get("config_groups"):
            raise ModelError(
                "The model's activations are to be transformed (transform_config), which is not "
                "supported."
            )
        numbers = [each.weights for each in schemes if each.weights is not None]
        for each in numbers:
            check_bits(
                f"compressed-tensors ({each.type})",
                each.num_bits,
                (4, 8) if each.type == "int" else (8,),
            )
        blocks = {each.block_structure for each in numbers} - {None}
        if len(blocks) > 1:
            raise ModelError("The weights have blocks of several sizes, which is not supported.")
        self.block = blocks.pop() if blocks else None

    def matrix(
        self, tensors: TensorFiles, module: str, shape: tuple[int, int]
    ) -> StoredMatrix | None:
        """See `Format`."""
        if f"{module}.weight_packed" in tensors:
            return _packed(tensors, module, shape)
        if f"{module}.weight_scale" not in tensors:
            return None
        kind = tensors.dtype(f"{module}.weight")
        if kind in FLOATS:
            return None
        if kind is torch.int8:
            numbers = tensors.read(f"{module}.weight", shape, (torch.int8,))
            return _grouped(tensors, module, _shifted(numbers, 8), 8)
        return scaled(tensors, module, "weight_scale", shape, self.block)


def _check_layouts(found: set[str]) -> None:
    if unknown := sorted(found - {*_LAYOUTS, _MIXED}):
        raise ModelError(
            f"The weights are stored as {unknown[0]!r} of compressed-tensors, which is not "
            f"supported; these are: {', '.join(_LAYOUTS)}."
        )


def _packed(tensors: TensorFiles, module: str, shape: tuple[int, int]) -> Grouped:
    outputs, inputs = shape
    name = f"{module}.weight_packed"
    bits = round(32 * tensors.shape(name, 2)[1] / inputs)
    check_bits(f"compressed-tensors ({module})", bits)
    words = tensors.read(name, (outputs, -(-inputs * bits // 32)), (torch.int32,))
    return _grouped(tensors, module, unpacked(words, bits)[:, :inputs], bits)


def _grouped(tensors: TensorFiles, module: str, numbers: Tensor, bits: int) -> Grouped:
    """These numbers, without a sign, over the layer's scales and zero points."""
    outputs, inputs = shape = (len(numbers), numbers.shape[1])
    name = f"{module}.weight_scale"
    found = tensors.shape(name)
    groups = inputs // scale_block(name, found, shape, None)[1]
    scales = tensors.read(name, found).view(-1, groups).expand(outputs, groups)
    zeros = torch.full((outputs, groups), 1 << (bits - 1), dtype=torch.int32)
    if f"{module}.weight_zero_point" in tensors:
        zeros = _zero_points(tensors, f"{module}.weight_zero_point", found, groups, outputs, bits)
    return Grouped(
        numbers.contiguous(),
        scales.contiguous(),
        zeros,
        bits,
        _groups(tensors, module, inputs, groups),
    )


def _zero_points(
    tensors: TensorFiles, name: str, scales: tuple[int, ...], groups: int, outputs: int, bits: int
) -> Tensor:
    """Without a sign: int32 [outputs, groups]."""
    if tensors.dtype(name) is torch.int32:
        packed = tensors.read(name, (-(-outputs * bits // 32), groups), (torch.int32,))
        return unpacked(packed.T, bits)[:, :outputs].T.int().contiguous()
    zeros = _shifted(tensors.read(name, scales, (torch.int8,)), bits)
    return zeros.view(-1, groups).expand(outputs, groups).int().contiguous()


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Integers with a sign -> uint8 with what makes the least of them 0 added."""
    return (numbers.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)


def _groups(tensors: TensorFiles, module: str, inputs: int, groups: int) -> Tensor | None:
    name = f"{module}.weight_g_idx"
    if name not in tensors:
        return None
    found = tensors.read(name, (inputs,), (torch.int32, torch.int64)).long()
    return None if (found == -1).any() else order_of(found, name, groups)
