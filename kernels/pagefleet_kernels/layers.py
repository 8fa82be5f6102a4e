"""What the layers of a decoder are to kernels that run all of them at once."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

import torch
from torch import Tensor


class Activation(Enum):
    """What gates go through before they multiply."""

    SILU = 0
    """x * sigmoid(x)"""
    GELU_TANH = 1
    """GELU by tanh (Hendrycks and Gimpel, 2016, section 2)"""
    CLAMPED = 2
    """x * sigmoid(CLAMP_SLOPE * x), of gates up to CLAMP; they multiply their values plus 1, which
    are clamped to both sides (OpenAI, "gpt-oss-120b & gpt-oss-20b model card", 2025, section 2.2)
    """


CLAMP, CLAMP_SLOPE = 7.0, 1.702


class Layer(Protocol):
    """A function of rows that knows its own weights, and those of its adapters."""

    def __call__(self, values: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, inputs] -> [T, outputs]; `adapters` is int32 [T], see `reference.linear`."""
        ...


HeadsLayer: TypeAlias = Callable[[Tensor], Tensor]
"""[T, H, inputs] -> [T, H, outputs], of each head by a matrix of its own."""


@dataclass(frozen=True)
class DenseMlp:
    """A feed-forward part that all rows go through; a `Layer` itself."""

    gated: Layer
    """activation(gate) * up"""
    down: Layer

    def __call__(self, values: Tensor, adapters: Tensor | None = None) -> Tensor:
        """See `Layer`."""
        return self.down(self.gated(values, adapters), adapters)


@dataclass(frozen=True)
class LatentLayers:
    """What multi-head latent attention has beside queries, keys and values (DeepSeek-AI,
    "DeepSeek-V2", 2024, section 2.1).

    A token's keys and values follow from one latent, c: in head h they are U c and V c, beside one
    rotated key that the heads share. The pool keeps c and that key. A head's score is q U c = (U^T
    q) c, its output V times the weighted sum of latents: so queries *absorb* U, and what comes of
    attention is *expanded* by V. All heads read the same entry, of which c is the value.
    """

    query_up: Layer | None
    """Queries of a latent of theirs, if they have one."""
    absorb: HeadsLayer
    """Queries to what meets entries; the rotated part stays as it is."""
    expand: HeadsLayer
    rank: int
    """Size of a latent."""


@dataclass(frozen=True)
class DecoderLayer:
    """One layer of a decoder; for norms see `reference.rms_norm`. Not every layer has each."""

    attention_norm: Tensor | None
    qkv: Layer
    query_norm: Tensor | None
    key_norm: Tensor | None
    """Norms of single heads, or of all of a token's, before they are rotated; or of latents."""
    output: Layer
    post_attention_norm: Tensor | None
    mlp_norm: Tensor | None
    post_mlp_norm: Tensor | None
    mlp: Layer
    """The feed-forward part: dense, or of experts."""
    rotation: Tensor
    """Cosines and sines, see `reference.rotary_write_kv`."""
    window: int
    sinks: Tensor | None
    """See `reference.attention`, as for the window."""
    latents: LatentLayers | None = None


@dataclass(frozen=True)
class StackShape:
    """What all layers of a decoder share; for `scale` and `softcap` see `reference.attention`, for
    `factor` `reference.add_rms_norm`.
    """

    query_heads: int
    heads: int
    head_size: int
    scale: float
    softcap: float
    eps: float
    factor: float
    dtype: torch.dtype


class Stack(Protocol):
    """All layers of a decoder at once."""

    def keep_kv_in_8_bits(self, scales: Tensor) -> None:
        """From now on `caches` hold e4m3, over `scales`, float32 [layers, 2, G]; see
        `reference.write_kv`.
        """
        ...

    def run(
        self,
        residual: Tensor,
        caches: Tensor,
        positions: Tensor,
        slots: Tensor,
        tables: Tensor,
        starts: Tensor,
        offsets: Tensor,
        adapters: Tensor | None,
        progress: Callable[[], None],
    ) -> Tensor:
        """Compute a step; keys and values are written to the pool.

        Args:
            residual: [T, hidden size], the embedded tokens.
            caches: [layers, 2, N, G, S, D].
            positions: int64 [T], in their sequences.
            slots: int64 [T], see `reference.write_kv`.
            tables: int32 [R, M].
            starts: int32 [R].
            offsets: int32 [R + 1], see `reference.attention`.
            adapters: int32 [T], see `reference.linear`.
            progress: called after every layer.

        Returns:
            [T, hidden size], normed; the next step overwrites it.
        """
        ...
