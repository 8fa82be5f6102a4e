"""What every check of a kernel is made of: random inputs, an error, and how large it may be."""

from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""What an error may be, by the type that a kernel computes from and rounds to."""


@dataclass(frozen=True)
class Check:
    """How far one kernel was off in one case, and how far it may be."""

    kernel: str
    case: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the kernel is right here; an error of NaN is none that is allowed."""
        return self.error <= self.allowed


class Inputs:
    """Random numbers on one device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)

    def permutation(self, size: int) -> Tensor:
        """The numbers below `size`, int64."""
        return torch.randperm(size, generator=self._generator).to(self.device)

    def integers(self, *values: int) -> Tensor:
        """int32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def poisoned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """NaN."""
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device)


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest relative-or-absolute error; NaN where only one of the two is NaN."""
    found, expected = found.double(), expected.double()
    both = found.isnan() & expected.isnan()
    errors = (found - expected).abs() / (1 + expected.abs())
    return float(errors.masked_fill(both, 0).max()) if errors.numel() else 0.0
