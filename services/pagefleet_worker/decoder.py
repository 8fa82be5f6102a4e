"""A decoder of the Llama family over a paged KV pool: one computation, switched by its config.

All tokens of a step, of all rows, lie one after another in one flat batch [T]; which row a token
belongs to matters to attention alone. Keys and values go to the pool first and are always read
back from it, so that a token's attention is the same arithmetic whether its context came with it
or with earlier steps.
The rows that pad a batch (`batch.ROW_MULTIPLE`) compute on whatever is there and are never read.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_kernels.dispatch import Kernels
from pagefleet_worker.batch import Batch, pad_rows
from pagefleet_worker.config import DecoderConfig
from pagefleet_worker.weights import DecoderWeights, LayerWeights


class Decoder:
    """Turns token ids into logits."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        kernels: Kernels,
        max_positions: int,
        progress: Callable[[], None],
    ) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._progress = progress
        table = config.rope.table(config.head_dim, max_positions)
        self._rotation = table.to(weights.embedding.device)

    def hidden(self, batch: Batch, pool: Tensor) -> Tensor:
        """Run all layers over the batch; keys and values are written to the pool.

        Args:
            batch: the step's rows.
            pool: [layers, 2, N, G, S, D].

        Returns:
            [P, hidden size], normed, for `logits`.
        """
        weights, norm_eps = self._weights, self._config.norm_eps
        hidden = F.embedding(batch.ids, weights.embedding)
        cosines, sines = self._rotation[batch.positions].unsqueeze(1).chunk(2, dim=-1)
        for layer, window, caches in zip(weights.layers, self._config.windows, pool, strict=True):
            normed = rms_norm(hidden, layer.attention_norm, norm_eps)
            hidden = hidden + self._attention(layer, normed, cosines, sines, window, batch, caches)
            normed = rms_norm(hidden, layer.mlp_norm, norm_eps)
            gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
            hidden = hidden + F.linear(silu_mul(gate_up), layer.down, layer.down_bias)
            self._progress()
        return rms_norm(hidden, weights.norm, norm_eps)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The vocabulary's scores at some tokens.

        Args:
            hidden: [P, hidden size], from `hidden`.
            rows: int64 [L], which of its rows.

        Returns:
            float32 [L, vocabulary size].
        """
        scores = F.linear(hidden[pad_rows(rows)], self._weights.head)
        return scores[: len(rows)].float()

    def _attention(
        self,
        layer: LayerWeights,
        normed: Tensor,
        cosines: Tensor,
        sines: Tensor,
        window: int,
        batch: Batch,
        caches: Tensor,
    ) -> Tensor:
        config, kernels = self._config, self._kernels
        heads = [config.heads, config.kv_heads, config.kv_heads]
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        query, key, value = torch.split(qkv.view(len(qkv), -1, config.head_dim), heads, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query, layer.query_norm, config.norm_eps)
            key = rms_norm(key, layer.key_norm, config.norm_eps)
        query, key = rotate(query, cosines, sines), rotate(key, cosines, sines)
        tokens = len(batch.slots)
        kernels.write_kv(key[:tokens], value[:tokens], caches[0], caches[1], batch.slots)
        attended = kernels.attention(
            query,
            caches[0],
            caches[1],
            batch.tables,
            batch.starts,
            batch.offsets,
            scale=config.head_dim**-0.5,
            window=window,
        )
        return F.linear(attended.flatten(1), layer.output, layer.output_bias)


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square layer normalization (Zhang and Sennrich, 2019) of the last dimension."""
    wide = values.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(values.dtype) * weight


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of [T, H, D] by float32 [T, 1, D / 2]; see `rope`."""
    first, second = heads.float().chunk(2, dim=-1)
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(rotated, dim=-1).to(heads.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension, times the second half (SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
