"""Matrices as quantized checkpoints store them, and what becomes of them here.

All formats of integers say the same in layouts of their own. The inputs of an output come in
groups, and a weight is

    scale * (number - zero point)

with a scale and a zero point for each group. That is a `Quantized` too if a group holds whole
groups of that: the scale is repeated, and with four bits the minimum is -scale * zero point. With
symmetric numbers, whose zero points are 8, that is exact; else the minimum is rounded to float16,
by 15 scales * 2 ** -11 at most, less than a hundredth of a step between two numbers. Scales that
are saved in float32 are rounded alike. Those that are too small or too large for float16 leave a
matrix without such a form.

Floats of 8 bits have scales for rectangles of the matrix, and are a `Quantized` exactly if no group
has two of them. Those of four bits have powers of two for groups, and are one exactly if these are
among those of float16.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor

from pagefleet_kernels.quantized import E4M3_GROUP, GROUP, Quantized, e2m1_halves
from pagefleet_worker.checkpoints.safetensors_files import TensorFiles
from pagefleet_worker.model_files import ModelError

_MIDDLE = 128
"""The zero point of numbers of eight bits in a `Quantized`."""

_ROUNDING = 2.0**-11
"""Of a float16, relatively, unless the number is too small or too large for one."""

_BIAS = 127
"""Of exponents of 8 bits (e8m0)."""

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Grouped:
    """A matrix of integers, [outputs, inputs].

    numbers: uint8 [outputs, inputs], below 2 ** bits.
    scales: floats [outputs, groups].
    zeros: integers, the same.
    groups: int64 [inputs], the group of each input; None if all are equally long and lie one after
        another.
    """

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    groups: Tensor | None = None

    def dequantized(self) -> Tensor:
        """The weights in float32, rounded once."""
        scales, zeros = self.scales.float(), self.zeros.float()
        if self.groups is not None:
            return (self.numbers - zeros[:, self.groups]).mul_(scales[:, self.groups])
        numbers = self.numbers.view(*scales.shape, -1)
        return (numbers - zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1)).flatten(1)

    def quantized(self) -> Quantized | None:
        """The same numbers as the kernels multiply them, if they can hold them."""
        size = self.numbers.shape[1] // self.scales.shape[1]
        scales, minimums = self.scales.half(), (-self.zeros * self.scales.float()).half()
        if self.groups is not None or size % GROUP or not _holds(scales, self.scales):
            return None
        repeated = scales.repeat_interleave(size // GROUP, dim=1)
        if self.bits == 8:
            return Quantized(self.numbers, repeated) if (self.zeros == _MIDDLE).all() else None
        if not minimums.isfinite().all():
            return None
        return Quantized(self.numbers, repeated, minimums.repeat_interleave(size // GROUP, dim=1))


@dataclass(frozen=True)
class Scaled:
    """A matrix of floats of 8 bits, [outputs, inputs].

    numbers: float8 [outputs, inputs].
    scales: floats, one for each rectangle of `block`, of which the last ones may be smaller.
    """

    numbers: Tensor
    scales: Tensor
    block: tuple[int, int]

    def dequantized(self) -> Tensor:
        """The weights in float32, rounded once."""
        outputs, inputs = self.numbers.shape
        height, width = self.block
        rows = self.scales.float().repeat_interleave(height, dim=0)[:outputs]
        return self.numbers.float().mul_(rows.repeat_interleave(width, dim=1)[:, :inputs])

    def quantized(self) -> Quantized | None:
        """The same numbers over a scale for each group, if no group has two."""
        outputs, inputs = self.numbers.shape
        height, width = self.block
        if width < inputs and width % E4M3_GROUP:
            return None
        rows = self.scales.float().repeat_interleave(height, dim=0)[:outputs]
        scales = rows.repeat_interleave(-(-width // E4M3_GROUP), dim=1)
        return Quantized(self.numbers, scales[:, : -(-inputs // E4M3_GROUP)].contiguous())


@dataclass(frozen=True)
class Micro:
    """A matrix of floats of four bits, [outputs, inputs].

    numbers: uint8 [outputs, inputs], e2m1.
    exponents: uint8 [outputs, inputs / GROUP], of 2; what they are too large by is `_BIAS`.
    """

    numbers: Tensor
    exponents: Tensor

    def dequantized(self) -> Tensor:
        """The weights in float32, exactly."""
        groups = e2m1_halves(self.numbers).view(*self.exponents.shape, GROUP)
        return groups.mul_(self._scales.unsqueeze(-1)).flatten(1)

    def quantized(self) -> Quantized | None:
        """The same numbers as the kernels multiply them, if they can hold them."""
        empty = (self.numbers & 7 == 0).view(*self.exponents.shape, GROUP).all(-1)
        scales = self._scales.masked_fill(empty, 0)
        halves = scales.half()
        exact = torch.equal(halves.float(), scales)
        return Quantized(self.numbers, halves, floats=True) if exact else None

    @property
    def _scales(self) -> Tensor:
        """Of halves."""
        halves = torch.full(self.exponents.shape, 0.5)
        return torch.ldexp(halves, self.exponents.int() - _BIAS)


StoredMatrix: TypeAlias = Grouped | Scaled | Micro


class Format(Protocol):
    """How a checkpoint stores the matrices that are quantized. Which ones are is told by the
    tensors that are there: what is named `weight` and is of floats is as it is everywhere.
    """

    def matrix(
        self, tensors: TensorFiles, module: str, shape: tuple[int, int]
    ) -> StoredMatrix | None:
        """The matrix [outputs, inputs] of the linear layer `module`; None if it is not quantized.

        Raises:
            ModelError: it is, but not as the config says.
        """
        ...


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Numbers of 4 or 8 bits in int32 words, the lowest first: [rows, words] -> uint8 [rows,
    numbers].
    """
    parts = words.contiguous().view(torch.uint8)
    return parts if bits == 8 else torch.stack((parts & 15, parts >> 4), dim=-1).flatten(1)


def order_of(found: Tensor, name: str, groups: int) -> Tensor | None:
    """`Grouped.groups`, from the group of each input as the tensor `name` says it.

    Raises:
        ModelError: there are not so many groups.
    """
    if not groups or found.min() < 0 or found.max() >= groups:
        raise ModelError(f"The tensor {name!r} names groups beyond the {groups} that have scales.")
    in_order = torch.arange(len(found)) // max(1, len(found) // groups)
    return None if len(found) % groups == 0 and torch.equal(found, in_order) else found


def converted(values: dict[str, Any], kind: type[_Kind]) -> _Kind:
    """A format of this kind, from its `quantization_config`.

    Raises:
        ModelError: it is malformed.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"The model's quantization_config is malformed: {error}.") from error


def check_bits(method: str, bits: int, possible: Sequence[int] = (4, 8)) -> None:
    """Refuse numbers of other widths."""
    if bits not in possible:
        raise ModelError(
            f"The weights are quantized by {method} to {bits} bits, which is not supported; "
            f"{' and '.join(map(str, possible))} are."
        )


def _holds(halves: Tensor, wanted: Tensor) -> bool:
    """Whether float16 has these numbers with its full precision."""
    return torch.allclose(halves.float(), wanted.float(), rtol=_ROUNDING, atol=0.0)
