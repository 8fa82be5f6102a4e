"""A decoder of the Llama family over a paged KV pool: one computation, switched by its config.

All tokens of a step, of all rows, lie one after another in one flat batch [T]; which row a token
belongs to matters to attention alone. Keys and values go to the pool first and are always read
back from it, so that a token's attention is the same arithmetic whether its context came with it
or with earlier steps."""

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
        self.config = config
        self.weights = weights
        self._kernels = kernels
        self._progress = progress
        cos_sin = config.rope.table(config.head_dim, max_positions)
        self._cos_sin = cos_sin.to(weights.embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights."""
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.embedding.device

    def hidden(self, batch: Batch, pool: Tensor) -> Tensor:
        """Run all layers over the batch; keys and values are written to the pool.

        Args:
            batch: the step's rows.
            pool: [layers, 2, N, G, S, D].

        Returns:
            [P, hidden size], normed, for `logits`.
        """
        weights, kernels, eps = self.weights, self._kernels, self.config.norm_eps
        residual = F.embedding(batch.ids, weights.embedding)
        normed = kernels.rms_norm(residual, weights.layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in weights.layers[1:]] + [weights.norm]
        for layer, next_norm, window, caches in zip(
            weights.layers, next_norms, self.config.windows, pool, strict=True
        ):
            attended = self._attention(layer, normed, window, batch, caches)
            normed, residual = kernels.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
            gated = F.linear(kernels.silu_mul(gate_up), layer.down, layer.down_bias)
            normed, residual = kernels.add_rms_norm(gated, residual, next_norm, eps)
            self._progress()
        return normed

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The vocabulary's scores at some tokens.

        Args:
            hidden: [P, hidden size], from `hidden`.
            rows: int64 [L], which of its rows.

        Returns:
            float32 [L, vocabulary size].
        """
        scores = F.linear(hidden[pad_rows(rows)], self.weights.head)
        return scores[: len(rows)].float()

    def _attention(
        self, layer: LayerWeights, normed: Tensor, window: int, batch: Batch, caches: Tensor
    ) -> Tensor:
        config, kernels = self.config, self._kernels
        tokens, head_dim = len(batch.slots), config.head_dim
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)[:tokens].view(tokens, -1, head_dim)
        query, key, value = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = kernels.rms_norm(query, layer.query_norm, config.norm_eps)
            key = kernels.rms_norm(key, layer.key_norm, config.norm_eps)
        query = kernels.rotary_write_kv(
            query, key, value, self._cos_sin, batch.positions, caches[0], caches[1], batch.slots
        )
        attended = kernels.attention(
            query,
            caches[0],
            caches[1],
            batch.tables,
            batch.starts,
            batch.offsets,
            scale=head_dim**-0.5,
            window=window,
        )
        return F.linear(pad_rows(attended.flatten(1)), layer.output, layer.output_bias)
