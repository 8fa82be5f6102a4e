"""How the weights of linear layers are laid out in memory for the loops of `cpu_gemm`."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_kernels.cpu_gemm import PANEL
from pagefleet_kernels.cpu_ir import LANES
from pagefleet_kernels.quantized import GROUP, Quantized

_CACHE_LINE = 64


class Arena:
    """Memory that tensors are moved to one after another, in large chunks.

    The system gives huge pages to large allocations only. Matrices of a megabyte or two, each in
    small pages of its own, took 15 % longer to read at one row (SmolLM2-135M).
    """

    CHUNK_BYTES = 32 << 20

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of a contiguous tensor, beside the ones before it."""
        return self.room(tensor.shape, tensor.dtype).copy_(tensor)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor to be filled, beside the ones before it."""
        taken = math.prod(shape) * dtype.itemsize
        size = -(-taken // _CACHE_LINE) * _CACHE_LINE
        if size > len(self._free):
            self._free = torch.empty(max(size, self.CHUNK_BYTES), dtype=torch.uint8)
        room = self._free[:taken].view(dtype).view(shape)
        self._free = self._free[size:]
        return room


arena = Arena()
"""Where all packed weights are kept."""


def interleaved(outputs: Tensor) -> Tensor:
    """Gates, then as many values, in turns of sixteen."""
    return outputs.view(2, -1, LANES).transpose(0, 1).flatten()


def packed(weight: Tensor, width: int = PANEL) -> Tensor:
    """[outputs, inputs] -> [panels, steps, width, inputs of a step]."""
    words = F.pad(weight, (0, 0, 0, -len(weight) % width)).view(torch.int32)
    panels = words.view(-1, width, words.shape[1]).transpose(1, 2).contiguous()
    return panels.unsqueeze(-1).view(weight.dtype)


def packed_groups(weight: Quantized) -> Tensor:
    """uint8 [panels, groups, bytes of a group]: scales, minimums, and numbers as `packed` has
    words; two of four bits share a byte, a step's below the next one's.
    """
    numbers, factors = weight.numbers, [weight.scales]
    if weight.bits == 4:
        steps = numbers.view(len(numbers), -1, 2, 4)
        numbers = (steps[:, :, 0] | steps[:, :, 1] << 4).flatten(1)
    if weight.minimums is not None:
        factors.append(weight.minimums)
    words = packed(numbers).view(-1, weight.scales.shape[1], GROUP * PANEL * weight.bits // 8)
    rows = [
        F.pad(each, (0, 0, 0, -len(each) % PANEL)).view(-1, PANEL, each.shape[1])
        for each in factors
    ]
    heads = [each.transpose(1, 2).contiguous().view(torch.uint8) for each in rows]
    return torch.cat([*heads, words], dim=2)
