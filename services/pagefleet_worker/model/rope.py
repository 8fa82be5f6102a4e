"""Rotary position embeddings (Su et al., RoFormer, 2021) and how models stretch them.

Each pair of a head's dimensions (i, i + D/2) turns by the angle position * frequency[i], where
frequency[i] = theta ** (-2i / D). A model that was trained on short contexts reaches longer ones
by lowering the frequencies; the variants differ in which ones, and by how much:

    linear   all of them, by one factor (position interpolation, Chen et al. 2023)
    llama3   those whose wavelength exceeds the trained context, with a ramp (Llama 3.1)
    yarn     the same with a ramp over turns per context, and scores scaled (Peng et al. 2023)
    longrope each by a factor of its own, found by search, of two sets: for sequences within the
             trained context, and beyond it (Ding et al. 2024)

Some models turn only the first part of a head, and some layers nothing. What does not turn has
angles of 0: so that it, too, comes in pairs (i, i + D/2), the decoder keeps the dimensions of such
heads in another order than the files do (`Rope.order`), of queries and keys alike, which changes no
score. So it does where the files have pairs (2i, 2i + 1), as RoFormer has them.

The fields have the names that they have in Hugging Face's `rope_parameters`, and the arithmetic is
in transformers' order: far into a context, one rounding more of a frequency is seen in the logits.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rope:
    """The embedding as RoFormer has it."""

    rope_theta: float
    partial_rotary_factor: float = 1.0
    """The part of each head that is turned."""
    interleaved: bool = False
    """Whether the dimensions that turn together are neighbours in the files."""

    def within(self, length: int) -> "Rope":
        """The embedding for sequences of up to so many tokens."""
        return self

    def turned(self, head_dim: int) -> int:
        """How many of a head's dimensions are turned."""
        return int(head_dim * self.partial_rotary_factor)

    def order(self, head_dim: int) -> Tensor | None:
        """The dimensions of a head, of those that files have, in the order in which those that turn
        together are D/2 apart: int64 [head_dim]; None if they are so already.
        """
        turned = self.turned(head_dim)
        if turned == 0 or (turned == head_dim and not self.interleaved):
            return None
        turning, still = torch.arange(turned), torch.arange(turned, head_dim)
        pairs = turning.view(-1, 2).T if self.interleaved else turning.view(2, -1)
        return torch.cat((pairs, still.view(2, (head_dim - turned) // 2)), dim=1).flatten()

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

    @property
    def temperature(self) -> float:
        """The factor on the scores of latents, of which the rotated part is only some."""
        return 1.0

    def table(self, head_dim: int, positions: int) -> Tensor:
        """Cosines, then sines, of every position's angles: float32 [positions, head_dim]."""
        steps, turned = torch.arange(positions, dtype=torch.float32), self.turned(head_dim)
        angles = torch.outer(steps, self.frequencies(turned))
        still = (0, (head_dim - turned) // 2)
        cosines = F.pad(angles.cos() * self.amplitude, still, value=1.0)
        return torch.cat((cosines, F.pad(angles.sin() * self.amplitude, still)), dim=1)


@dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Position interpolation."""

    factor: float

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position of each pair: float32 [head_dim / 2]."""
        return super().frequencies(head_dim) / self.factor


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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

    @property
    def temperature(self) -> float:
        """The factor on the scores of latents."""
        return self._temperature(self.mscale_all_dim or 0.0) ** 2

    def _temperature(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """LongRoPE (Ding et al., 2024, section 3). Which factors hold follows from the longest sequence
    that is served, not from each: a token's keys must not change when its sequence grows.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    long: bool = False
    """Whether sequences may exceed the trained context."""

    def within(self, length: int) -> Rope:
        """The embedding for sequences of up to so many tokens."""
        return replace(self, long=length > self.original_max_position_embeddings)

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position of each pair: float32 [head_dim / 2]."""
        factors = torch.tensor(self.long_factor if self.long else self.short_factor)
        return 1.0 / (factors * self._periods(head_dim))

    @property
    def amplitude(self) -> float:
        """The factor on the rotated queries and keys."""
        trained = self.original_max_position_embeddings
        factor = self.factor or self.max_position_embeddings / trained
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))


VARIANTS: dict[str, type[Rope]] = {
    "default": Rope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
    "su": LongRope,
}
"""By the `rope_type` of a model's config."""
