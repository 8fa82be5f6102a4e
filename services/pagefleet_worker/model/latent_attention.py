"""Attention over latents, which all heads share: see `layers.LatentLayers`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pagefleet_kernels.dispatch import Kernels
from pagefleet_kernels.layers import DecoderLayer, LatentLayers
from pagefleet_kernels.lora import Loras
from pagefleet_worker.model.config import DecoderConfig
from pagefleet_worker.model.latent_config import NORM_EPS, LatentShape
from pagefleet_worker.model.weights import LayerWeights
from pagefleet_worker.paging.batch import Batch


def prepare_latents(
    config: DecoderConfig, weights: LayerWeights, kernels: Kernels, loras: Mapping[str, Loras]
) -> LatentLayers | None:
    """The matrices of a layer, as `kernels` want them; None if it has no latents."""
    shape = config.latent
    if shape is None or weights.kv_up is None:
        return None
    ups = weights.kv_up.view(config.heads, shape.still + shape.value, shape.rank)
    key_up, value_up = torch.split(ups, [shape.still, shape.value], 1)
    absorb = ups.new_zeros(config.heads, shape.entry, shape.query)
    absorb[:, : shape.rank, : shape.still] = key_up.mT
    absorb[:, shape.rank :, shape.still :].diagonal(dim1=1, dim2=2).fill_(1)
    query_up = None
    if weights.query_up is not None:
        query_up = kernels.linear(weights.query_up, None, loras["query_up"])
    by_heads = kernels.by_heads(absorb), kernels.by_heads(value_up.contiguous())
    return LatentLayers(query_up, *by_heads, shape.rank)


def attend(
    kernels: Kernels,
    layer: DecoderLayer,
    latents: LatentLayers,
    shape: LatentShape,
    normed: Tensor,
    batch: Batch,
    cache: Tensor,
    scale: float,
) -> Tensor:
    """What a layer's attention gives; entries go to the pool first.

    Args:
        normed: [T, hidden size].
        cache: [N, 1, S, entry].

    Returns:
        [T, hidden size].
    """
    fused = layer.qkv(normed, batch.adapters)
    sizes = [fused.shape[1] - shape.entry, shape.rank, shape.turned]
    query, latent, key = torch.split(fused, sizes, 1)
    if latents.query_up is not None and layer.query_norm is not None:
        query = kernels.rms_norm(query, layer.query_norm, NORM_EPS)
        query = latents.query_up(query, batch.adapters)
    assert layer.key_norm is not None
    latent = kernels.rms_norm(latent, layer.key_norm, NORM_EPS)
    query = query.view(len(query), -1, shape.query)
    placed = layer.rotation, batch.positions, cache, batch.slots
    query = kernels.rotary_write_latents(query, latent, key, *placed)
    rows = batch.tables, batch.starts, batch.offsets
    values = cache[..., : latents.rank]
    attended = kernels.attention(latents.absorb(query), cache, values, *rows, scale=scale)
    return layer.output(latents.expand(attended).flatten(1), batch.adapters)
