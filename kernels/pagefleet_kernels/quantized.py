"""Matrices of a few bits a number, in groups that share a scale, as GGUF's simpler blocks are.

An output's weights are cut into groups of GROUP inputs. Of each group there is a float16 scale, and
with four bits a float16 minimum too; a weight is

    scale * (number - 128)        eight bits (Q8_0)
    scale * number + minimum      four bits (Q4_1, and Q4_0 with a minimum of -8 scales)
    scale * E2M1_HALVES[number]   floats of four bits (MXFP4, with half of its scales)

The last are halves in a table of sixteen (e2m1; Rouhani et al., "Microscaling data formats for deep
learning", 2023, section 3), so that they are integers too where they are multiplied. Floats of
eight bits (e4m3; Micikevicius et al., "FP8 formats for deep learning", 2022) come in longer groups,
over scales in float32; a weight is scale * number, and only GPUs multiply them.

On a CPU products with such a matrix take their inputs in eight bits as well, quantized row by row
as they come, so that whole groups are multiplied in integers (as llama.cpp does, and in the spirit
of Dettmers et al., "LLM.int8()", NeurIPS 2022, with groups in the place of its outliers). A GPU
widens the weights instead as it reads them (`triton_packed`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self, TypeAlias

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale."""

E4M3_GROUP = 128
"""Inputs that share a scale where numbers are e4m3; of the last group some may be missing."""

E2M1_HALVES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of e2m1, by their bits."""

_LARGEST = 127


class Kind(Enum):
    """What numbers stand for."""

    INT4 = 0
    INT8 = 1
    E2M1 = 2
    E4M3 = 3


@dataclass(frozen=True)
class Quantized:
    """A matrix of [outputs, inputs].

    numbers: uint8 [outputs, inputs], below 16 if there are minimums or they are `floats`; or
        float8_e4m3fn.
    scales: float16 [outputs, inputs / group], or float32 of e4m3.
    minimums: the same, of integers of four bits.
    floats: whether numbers are e2m1.
    """

    numbers: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    floats: bool = field(default=False, kw_only=True)

    @property
    def shape(self) -> torch.Size:
        """Outputs and inputs."""
        return self.numbers.shape

    @property
    def kind(self) -> Kind:
        """Of the numbers."""
        if self.numbers.dtype is torch.float8_e4m3fn:
            return Kind.E4M3
        if self.floats:
            return Kind.E2M1
        return Kind.INT8 if self.minimums is None else Kind.INT4

    @property
    def bits(self) -> int:
        """Of a number."""
        return 8 if self.kind in (Kind.INT8, Kind.E4M3) else 4

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return E4M3_GROUP if self.kind is Kind.E4M3 else GROUP

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """The nearest matrix of eight bits.

        Raises:
            ValueError: its inputs do not come in whole groups.
        """
        numbers, scales = quantize_rows(weight, torch.float16)
        return cls((numbers.to(torch.int16) + 128).to(torch.uint8), scales)

    @classmethod
    def stacked(cls, parts: "Sequence[Quantized]") -> Self:
        """Matrices of the same inputs and bits, one below the other."""
        minimums = [part.minimums for part in parts if part.minimums is not None]
        return cls(
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(minimums) if minimums else None,
            floats=parts[0].floats,
        )

    def rows(self, order: Tensor) -> "Quantized":
        """Some outputs, or all in another order."""
        minimums = None if self.minimums is None else self.minimums[order]
        return Quantized(self.numbers[order], self.scales[order], minimums, floats=self.floats)

    def part(self, outputs: slice, inputs: slice) -> "Quantized":
        """Some outputs of some inputs, which are whole groups."""
        groups = slice(inputs.start // self.group, -(-inputs.stop // self.group))
        minimums = None if self.minimums is None else self.minimums[outputs, groups]
        numbers, scales = self.numbers[outputs, inputs], self.scales[outputs, groups]
        return Quantized(numbers, scales, minimums, floats=self.floats)

    def to(self, device: torch.device) -> "Quantized":
        """The same on another device."""
        minimums = None if self.minimums is None else self.minimums.to(device)
        return Quantized(
            self.numbers.to(device), self.scales.to(device), minimums, floats=self.floats
        )

    def dequantized(self) -> Tensor:
        """The weights in float32."""
        if self.kind is Kind.E4M3:
            scales = self.scales.repeat_interleave(E4M3_GROUP, dim=1)
            return self.numbers.float() * scales[:, : self.shape[1]]
        numbers = e2m1_halves(self.numbers) if self.floats else self.numbers.float()
        groups = numbers.view(len(numbers), -1, GROUP)
        scales = self.scales.float().unsqueeze(-1)
        if self.floats:
            weights = groups * scales
        elif self.minimums is None:
            weights = (groups - 128) * scales
        else:
            weights = groups * scales + self.minimums.float().unsqueeze(-1)
        return weights.flatten(1)


def e2m1_halves(numbers: Tensor) -> Tensor:
    """Twice the numbers that e2m1 stands for, uint8 -> float32."""
    return torch.tensor(E2M1_HALVES, dtype=torch.float32, device=numbers.device)[numbers.int()]


Matrix: TypeAlias = Tensor | Quantized
"""[outputs, inputs], plain or quantized."""


def quantize_rows(values: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[rows, inputs] as int8 [rows, inputs] times scales [rows, inputs / GROUP].

    Raises:
        ValueError: the inputs do not come in whole groups.
    """
    if values.shape[1] % GROUP:
        raise ValueError(
            f"Rows of {values.shape[1]} numbers cannot be quantized: it is no multiple of {GROUP}."
        )
    groups = values.float().view(len(values), -1, GROUP)
    scales = (groups.abs().amax(-1, keepdim=True) / _LARGEST).to(scale_dtype)
    tiny = scales.float() < torch.finfo(torch.float32).tiny
    factors = torch.where(tiny, 0.0, 1.0 / scales.float())
    numbers = (groups * factors).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return numbers.flatten(1), scales.squeeze(-1)


def round_rows(values: Tensor) -> Tensor:
    """What is left of [rows, inputs] in eight bits, as float32."""
    numbers, scales = quantize_rows(values, torch.float32)
    return (numbers.view(*scales.shape, GROUP) * scales.unsqueeze(-1)).flatten(1)
