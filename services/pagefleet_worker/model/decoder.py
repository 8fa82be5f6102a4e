"""A decoder over a paged KV pool: one computation, switched by its config (`config`).

All tokens of a step, of all rows, lie one after another in one flat batch [T]; which row a token
belongs to matters to attention alone. Keys and values go to the pool first and are always read
back from it, so that a token's attention is the same arithmetic whether its context came with it
or with earlier steps.

One of several ranks computes with its share of the tensors (`shares`): each has some of the heads
and of the inner neurons, so that the sums over the ranks are the layers' outputs, and some of the
vocabulary. What lies between the layers is the same in all.

The rows of a step may have different LoRA adapters, or none: every linear layer knows the factors
of all of them (`lora`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_kernels.dispatch import Kernels
from pagefleet_kernels.experts import Experts
from pagefleet_kernels.layers import DecoderLayer, DenseMlp, Layer, Stack, StackShape
from pagefleet_kernels.lora import Loras
from pagefleet_worker.model.config import DecoderConfig
from pagefleet_worker.model.latent_attention import attend, prepare_latents
from pagefleet_worker.model.lora import LayerFactors
from pagefleet_worker.model.ranks import ALONE, Ranks
from pagefleet_worker.model.weights import DecoderWeights, LayerWeights
from pagefleet_worker.paging.batch import Batch


def prepare_layer(
    config: DecoderConfig,
    number: int,
    weights: LayerWeights,
    kernels: Kernels,
    rotation: Tensor,
    changes: Sequence[LayerFactors] = (),
) -> DecoderLayer:
    """Layer `number`, with matrices as `kernels` want them; `changes` are those of each adapter."""
    loras = {field: [each[field] for each in changes] for field in config.modules}
    return DecoderLayer(
        attention_norm=weights.attention_norm,
        qkv=kernels.linear(weights.qkv, weights.qkv_bias, loras["qkv"]),
        query_norm=weights.query_norm,
        key_norm=weights.key_norm,
        output=kernels.linear(weights.output, weights.output_bias, loras["output"]),
        post_attention_norm=weights.post_attention_norm,
        mlp_norm=weights.mlp_norm,
        post_mlp_norm=weights.post_mlp_norm,
        mlp=_prepare_mlp(config, number, weights, kernels, loras),
        rotation=rotation,
        window=config.windows[number],
        sinks=weights.sinks,
        latents=prepare_latents(config, weights, kernels, loras),
    )


def _prepare_mlp(
    config: DecoderConfig,
    number: int,
    weights: LayerWeights,
    kernels: Kernels,
    loras: Mapping[str, Loras],
) -> Layer:
    experts = config.experts_of(number)
    if weights.router is not None and experts is not None:
        matrices = weights.router, weights.gate_up, weights.down
        biases = weights.router_bias, weights.gate_up_bias, weights.down_bias
        rest = config.activation, weights.correction
        return kernels.experts(Experts(*matrices, experts.routing, *biases, *rest))
    gates = weights.gate_up, weights.gate_up_bias, loras["gate_up"]
    return DenseMlp(
        gated=kernels.gated(*gates, config.activation),
        down=kernels.linear(weights.down, weights.down_bias, loras["down"]),
    )


class Decoder:
    """Turns token ids into logits."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        kernels: Kernels,
        max_positions: int,
        progress: Callable[[], None],
        ranks: Ranks = ALONE,
        changes: Sequence[Iterable[LayerFactors]] = (),
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.adapters = len(changes)
        self._ranks = ranks
        self.layers = self._prepare_layers(weights, max_positions, changes)
        self.kinds = sorted(kind.name.lower() for kind in weights.kinds)
        self._embedding, self._norm = weights.embedding, weights.norm
        self._head = kernels.head(weights.head)
        scale = torch.tensor(config.embedding_scale).to(self._embedding)
        self._scale = None if config.embedding_scale == 1 else scale
        self._progress = progress
        heads = (config.heads, config.kv_heads, config.head_dim)
        numbers = (config.scale, config.softcap, config.norm_eps, config.residual_factor)
        shape = StackShape(*heads, *numbers, weights.embedding.dtype)
        self._kv_scales: Tensor | None = None
        self._stack: Stack | None = None
        if ranks is ALONE:
            self._stack = kernels.stack(self.layers, self._norm, shape)
        if self._stack is None:
            self._warm_up()

    def _prepare_layers(
        self,
        weights: DecoderWeights,
        max_positions: int,
        changes: Sequence[Iterable[LayerFactors]],
    ) -> list[DecoderLayer]:
        config, embedding, count = self.config, weights.embedding, self.config.layers
        tables = {
            rope: rope.table(config.turned_dim, max_positions).to(embedding.device)
            for rope in set(config.ropes)
        }
        by_layer = zip(*changes, strict=True) if changes else repeat((), count)
        rotations = [tables[rope] for rope in config.ropes]
        each = zip(weights.layers, rotations, by_layer, strict=True)
        return [
            prepare_layer(config, number, layer, self.kernels, rotation, factors)
            for number, (layer, rotation, factors) in enumerate(each)
        ]

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights."""
        return self._embedding.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """That of the pool: as the weights', or uint8 for numbers of 8 bits."""
        return self.dtype if self._kv_scales is None else torch.uint8

    def keep_kv_in_8_bits(self, scales: Tensor) -> None:
        """From now on pools hold e4m3, over `scales`, float32 [layers, 2, G] on the device; see
        `reference.write_kv`.
        """
        self._kv_scales = scales
        if self._stack is not None:
            self._stack.keep_kv_in_8_bits(scales)
        else:
            self._warm_up()

    def _warm_up(self) -> None:
        config = self.config
        heads = (config.heads, config.kv_heads, config.head_dim)
        latent = 0 if config.latent is None else config.latent.rank
        self.kernels.warm_up(self.dtype, self.kv_dtype, *heads, latent)

    @property
    def kv_scales(self) -> Tensor | None:
        """Of keys and values of 8 bits, see `keep_kv_in_8_bits`."""
        return self._kv_scales

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embedding.device

    def hidden(self, batch: Batch, pool: Tensor) -> Tensor:
        """Run all layers over the batch; keys and values are written to the pool.

        Args:
            batch: the step's rows.
            pool: [layers, 2, N, G, S, D], or of latents [layers, 1, N, 1, S, D].

        Returns:
            [T, hidden size], normed, for `logits`; the next step may overwrite it.
        """
        if self._stack is None:
            return self.hidden_by_layer(batch, pool)
        return self._stack.run(
            self._embedded(batch),
            pool,
            batch.positions,
            batch.slots,
            batch.tables,
            batch.starts,
            batch.offsets,
            batch.adapters,
            self._progress,
        )

    def hidden_by_layer(self, batch: Batch, pool: Tensor) -> Tensor:
        """`hidden`, one kernel after another."""
        kernels, ranks, eps = self.kernels, self._ranks, self.config.norm_eps
        factor, first_norm = self.config.residual_factor, self.layers[0].attention_norm
        residual = normed = self._embedded(batch)
        if first_norm is not None:
            normed = kernels.rms_norm(residual, first_norm, eps)
        next_norms = [layer.attention_norm for layer in self.layers[1:]] + [self._norm]
        scales = self._kv_scales if self._kv_scales is not None else [None] * len(pool)
        for layer, next_norm, *kept in zip(self.layers, next_norms, pool, scales, strict=True):
            attended = ranks.sum(self._attention(layer, normed, batch, *kept))
            norms = layer.mlp_norm, eps, layer.post_attention_norm
            normed, residual = kernels.add_rms_norm(attended, residual, *norms, factor)
            fed = ranks.sum(layer.mlp(normed, batch.adapters))
            norms = next_norm, eps, layer.post_mlp_norm
            normed, residual = kernels.add_rms_norm(fed, residual, *norms, factor)
            self._progress()
        return normed

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """The vocabulary's scores at some tokens.

        Args:
            hidden: from `hidden`.
            rows: int64 [L], which of its rows.

        Returns:
            float32 [L, vocabulary size].
        """
        config = self.config
        scores = self._ranks.beside(self._head(hidden[rows]))[:, : config.vocab_size]
        if config.logits_divisor != 1:
            scores = scores.div_(config.logits_divisor)
        if config.logits_softcap:
            scores = scores.div_(config.logits_softcap).tanh_().mul_(config.logits_softcap)
        return scores

    def _embedded(self, batch: Batch) -> Tensor:
        """The step's tokens, without those that pad it: [T, hidden size]."""
        embedded = self._looked_up(batch.ids[: len(batch.slots)])
        return embedded if self._scale is None else embedded.mul_(self._scale)

    def _looked_up(self, ids: Tensor) -> Tensor:
        if self._ranks is ALONE:
            return F.embedding(ids, self._embedding)
        count = len(self._embedding)
        ids = ids - self._ranks.share.rank * count
        elsewhere = (ids < 0) | (ids >= count)
        embedded = F.embedding(ids.masked_fill(elsewhere, 0), self._embedding)
        return self._ranks.sum(embedded.masked_fill_(elsewhere.unsqueeze(1), 0))

    def _attention(
        self,
        layer: DecoderLayer,
        normed: Tensor,
        batch: Batch,
        caches: Tensor,
        kv_scales: Tensor | None,
    ) -> Tensor:
        config, kernels = self.config, self.kernels
        head_dim, latents = config.head_dim, layer.latents
        if latents is not None and config.latent is not None:
            shared = config.latent, normed, batch, caches[0], config.scale
            return attend(kernels, layer, latents, *shared)
        qkv = layer.qkv(normed, batch.adapters).view(len(normed), -1, head_dim)
        query, key, value = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], 1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._norm_heads(query, layer.query_norm)
            key = self._norm_heads(key, layer.key_norm)
        eight_bits = {} if kv_scales is None else {"kv_scales": kv_scales}
        placed = (batch.positions, caches[0], caches[1], batch.slots)
        query = kernels.rotary_write_kv(query, key, value, layer.rotation, *placed, **eight_bits)
        attended = kernels.attention(
            query,
            caches[0],
            caches[1],
            batch.tables,
            batch.starts,
            batch.offsets,
            scale=config.scale,
            window=layer.window,
            softcap=config.softcap,
            sinks=layer.sinks,
            **eight_bits,
        )
        return layer.output(attended.flatten(1), batch.adapters)

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Heads [T, H, D], each by itself or all of a token together, as long as the weight is; to
        these belong those of other ranks.
        """
        rms_norm, eps, (tokens, _, dim) = self.kernels.rms_norm, self.config.norm_eps, heads.shape
        count, share = len(weight) // dim, self._ranks.share
        if count == 1:
            return rms_norm(heads, weight, eps)
        found = self._ranks.beside(heads.flatten(1)).view(tokens, share.ranks, -1, dim)
        copies = share.ranks * found.shape[2] // count  # neighbours hold the same keys
        normed = rms_norm(found[:, ::copies].reshape(tokens, -1), weight, eps)
        return normed.view(tokens, count, dim)[:, share.kv_heads(count).span]
