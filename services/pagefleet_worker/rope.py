"""Rotary position embeddings (Su et al., RoFormer, 2021) and how models stretch them.

Each pair of a head's dimensions (i, i + D/2) turns by the angle position * frequency[i], where
frequency[i] = theta ** (-2i / D). A model that was trained on short contexts reaches longer ones
by lowering the frequencies; the variants differ in which ones, and by how much:

    linear   all of them, by one factor (position interpolation, Chen et al. 2023)
    llama3   those whose wavelength exceeds the trained context, with a ramp (Llama 3.1)
    yarn     the same with a ramp over turns per context, and scores scaled (Peng et al. 2023)

The fields have the names that they have in Hugging Face's `rope_parameters`, and the arithmetic is
in transformers' order: far into a context, one rounding more of a frequency is seen in the logits.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """The embedding as RoFormer has it."""

    rope_theta: float

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position of each pair: float32 [head_dim / 2]."""
        return 1.0 / self._periods(head_dim)

    def _periods(self, head_dim: int) -> Tensor:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return self.rope_theta**exponents

    @property
    def amplitude(self) -> float:
        """The factor on the rotated queries and keys."""
        return 1.0

    def table(self, head_dim: int, positions: int) -> Tensor:
        """Cosines, then sines, of every position's angles: float32 [positions, head_dim]."""
        steps = torch.arange(positions, dtype=torch.float32)
        angles = torch.outer(steps, self.frequencies(head_dim))
        return torch.cat((angles.cos(), angles.sin()), dim=1) * self.amplitude


@dataclass(frozen=True)
class LinearRope(Rope):
    """Position interpolation."""

    factor: float

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position of each pair: float32 [head_dim / 2]."""
        return super().frequencies(head_dim) / self.factor


@dataclass(frozen=True)
class Llama3Rope(Rope):
    """Llama 3.1's stretch; frequencies are told apart by turns within the trained context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position of each pair: float32 [head_dim / 2]."""
        trained = super().frequencies(head_dim)
        turns = self.original_max_position_embeddings / (2 * math.pi / trained)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * trained / self.factor + kept * trained


@dataclass(frozen=True)
class YarnRope(Rope):
    """YaRN ("NTK-by-parts" interpolation, section 3.2, with the temperature of section 3.4)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position of each pair: float32 [head_dim / 2]."""
        periods = self._periods(head_dim)
        low = self._dimension(self.beta_fast or 32.0, head_dim)
        high = self._dimension(self.beta_slow or 1.0, head_dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / width
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _dimension(self, turns: float, head_dim: int) -> float:
        """The pair, as a real number, that turns so often within the trained context."""
        wavelength = self.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(self.rope_theta))

    @property
    def amplitude(self) -> float:
        """The factor on the rotated queries and keys; its square scales the scores."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


VARIANTS: dict[str, type[Rope]] = {
    "default": Rope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}
"""By the `rope_type` of a model's config."""
