"""What every kernel means, in plain torch: the oracle that the fast twins are compared with.

The layout is the contract. A layer's `key_cache` and `value_cache` have the shape [N, G, S, D]: a
block's share of one head is S x D contiguous values, the tile that the kernels load (those of a CPU
transpose the keys within it: `cpu_rows`). Of *latents* there is one cache: a value is the first
numbers of its key, so that `value_cache` is a view of `key_cache`, and all heads of a query read
the same (see `layers.LatentLayers`). Position p of a row lives in physical block `tables[row, p //
S]`, slot `p % S` (PagedAttention, Kwon et al., SOSP 2023, section 4.1). A row's queries are the
tokens `offsets[row] .. offsets[row + 1]`; they stand at positions `starts[row], starts[row] + 1,
...` and each sees the positions up to its own. There is no prefill and no decode: a prefill is a
row of many tokens, a decode a row of one.

Everything computes in the dtype of `query`, upcast to at least float32; call with float64 tensors
for an oracle.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pagefleet_kernels.experts import Experts
from pagefleet_kernels.layers import CLAMP, CLAMP_SLOPE, Activation, HeadsLayer, Layer
from pagefleet_kernels.lora import Loras
from pagefleet_kernels.quantized import Matrix, round_rows
from pagefleet_kernels.reference_cache import copy_blocks as copy_blocks
from pagefleet_kernels.reference_cache import from_e4m3
from pagefleet_kernels.reference_cache import rotary_write_kv as rotary_write_kv
from pagefleet_kernels.reference_cache import rotary_write_latents as rotary_write_latents
from pagefleet_kernels.reference_cache import write_kv as write_kv
from pagefleet_kernels.reference_routing import route as route


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    starts: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Causal attention of every row's tokens over the row's blocks.

    Args:
        query: [T, H, D]; head h reads key/value head h // (H / G).
        key_cache: [N, G, S, D], the keys of the step's own tokens already written.
        value_cache: the same shape, or of latents [N, 1, S, V], its first numbers.
        tables: int32 [R, M]; entries past a row's last position are never read.
        starts: int32 [R], the position of each row's first query token.
        offsets: int32 [R + 1], where each row's tokens begin and end in `query`.
        scale: the factor on the scores, usually D ** -0.5.
        window: a query sees its own position and the window - 1 before it; 0 means all.
        softcap: scores become softcap * tanh(score / softcap); 0 means off.
        slopes: float32 [H], ALiBi: slope * (key position - query position) is added to the scores.
        sinks: float32 [H], of each head a score of nothing: it takes its part of the weights, and
            no value comes of it (attention sinks, Xiao et al., ICLR 2024, section 3.3).
        kv_scales: for caches of uint8, see `write_kv`.

    Returns:
        [T, H, D], or of latents [T, H, V], in the dtype of `query`.
    """
    compute = torch.promote_types(query.dtype, torch.float32)
    block_size, groups = key_cache.shape[2], query.shape[1] // key_cache.shape[1]
    caches = [key_cache, value_cache]
    if kv_scales is not None:
        pairs = zip(caches, kv_scales.to(compute), strict=True)
        caches = [from_e4m3(cache).to(compute) * scales[:, None, None] for cache, scales in pairs]
    output = query.new_empty(*query.shape[:2], value_cache.shape[3])
    bounds = offsets.tolist()
    for row, start in enumerate(starts.tolist()):
        first, last = bounds[row], bounds[row + 1]
        if first == last:
            continue
        context = start + last - first
        blocks = tables[row, : -(-context // block_size)].long()
        keys, values = (
            cache[blocks]  # [blocks, G, S, D]
            .transpose(0, 1)
            .flatten(1, 2)[:, :context]  # [G, context, D]
            .to(compute)
            .repeat_interleave(groups, dim=0)
            for cache in caches
        )
        scores = torch.einsum("thd,hcd->htc", query[first:last].to(compute), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(start, context, device=query.device)[:, None]
        distance = torch.arange(context, device=query.device)[None, :] - positions
        if slopes is not None:
            scores = scores + slopes.to(compute)[:, None, None] * distance
        hidden = distance > 0
        if window:
            hidden |= distance <= -window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            nothing = sinks.to(compute)[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat([scores, nothing], dim=-1)
        weights = scores.softmax(dim=-1)[..., :context]
        output[first:last] = torch.einsum("htc,hcd->thd", weights, values).to(query.dtype)
    return output


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square layer normalization (Zhang and Sennrich, NeurIPS 2019).

    Args:
        values: [T, size] or [T, heads, size]; the last dimension is normed.
        weight: [size], of the dtype of `values` or of float32.
        eps: added to the mean square.

    Returns:
        The shape and dtype of `values`; rounded once before the weight and once after, as Llama
        does, or with a weight of float32 after it only, as Gemma does.
    """
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == values.dtype:
        normed = normed.to(values.dtype)
    return (normed * weight).to(values.dtype)


def add_rms_norm(
    values: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    post: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """What a part of a layer gave comes to the residual stream, and is normed for the next part.

    Args:
        values: [T, size].
        residual: the same.
        weight: see `rms_norm`; None if the next part reads the sum as it is.
        eps: see `rms_norm`.
        post: the weight of a norm that `values` go through first.
        factor: on `values`, behind that norm.

    Returns:
        (rms_norm(sum), sum) of sum = factor * values + residual; every step is rounded.
    """
    if post is not None:
        values = rms_norm(values, post, eps)
    if factor != 1:
        values = values * factor
    added = values + residual
    return added if weight is None else rms_norm(added, weight, eps), added


def gate_mul(gate_up: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    """The activation of the first half of the last dimension times the second half (SwiGLU, GEGLU,
    Shazeer, 2020).

    Args:
        gate_up: [T, 2 * size].
        activation: of the gates, and what it makes of the second half.

    Returns:
        [T, size] in the dtype of `gate_up`; rounded once before the product and once after.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is Activation.CLAMPED:
        gate, up = (half.to(torch.promote_types(half.dtype, torch.float32)) for half in (gate, up))
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        activated = (gate * torch.sigmoid(CLAMP_SLOPE * gate)).to(gate_up.dtype)
        return (activated * (up + 1)).to(gate_up.dtype)
    if activation is Activation.GELU_TANH:
        return F.gelu(gate, approximate="tanh") * up
    return F.silu(gate) * up


def linear(weight: Matrix, bias: Tensor | None = None, loras: Loras = ()) -> Layer:
    """Makes the layer y = x W^T + b; it takes [T, inputs] and gives [T, outputs].

    Called with int32 [T] for each row's adapter, it adds `lora` to the rows whose number is not 0;
    the others have the bits that they have without. Kernels that hold the product's sums add to
    them before they round; here and behind a library's product that is rounded too.

    Args:
        weight: [outputs, inputs]; if it is quantized, x is too, as on a CPU (see `quantized`).
        bias: [outputs].
        loras: of each adapter of the model; the first one's number is 1.
    """
    product = _product(weight, bias)

    def layer(values: Tensor, adapters: Tensor | None = None) -> Tensor:
        output = product(values)
        if adapters is None or not any(loras):
            return output
        added = output + lora(values, adapters, loras, output.shape[1])
        return torch.where(adapters.unsqueeze(1) > 0, added.to(output.dtype), output)

    return layer


def _product(weight: Matrix, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    if isinstance(weight, Tensor):
        return lambda values: F.linear(values, weight, bias)
    product, wide_bias = weight.dequantized(), None if bias is None else bias.float()
    return lambda values: F.linear(round_rows(values), product, wide_bias).to(values.dtype)


def lora(values: Tensor, adapters: Tensor, loras: Loras, outputs: int) -> Tensor:
    """What the rows' adapters add to the outputs of a layer (see `pagefleet_kernels.lora`).

    scale * (A x) is summed up, scaled and then rounded to the dtype of x; B's product with that is
    not rounded.

    Args:
        values: [T, inputs].
        adapters: int32 [T], a number for each row: of `loras`, counting from 1; 0 is none.
        loras: of each adapter.
        outputs: of the layer.

    Returns:
        [T, outputs], at least float32.
    """
    compute = torch.promote_types(values.dtype, torch.float32)
    added = values.new_zeros(len(values), outputs, dtype=compute)
    for number, changes in enumerate(loras, 1):
        rows = (adapters == number).nonzero().squeeze(1)
        wide = values[rows].to(compute)
        for factors in changes:
            inner = (wide @ factors.down.to(compute).T * factors.scale).to(values.dtype)
            product = inner.to(compute) @ factors.up.to(compute).T
            added[rows, factors.first : factors.first + len(factors.up)] = product
    return added


def by_heads(weights: Tensor) -> HeadsLayer:
    """Makes a layer of a matrix for each head: it takes [T, H, inputs] and gives [T, H, outputs].

    Args:
        weights: [H, outputs, inputs].
    """
    return lambda values: torch.einsum("thi,hoi->tho", values, weights)


def gated(
    weight: Matrix,
    bias: Tensor | None = None,
    loras: Loras = (),
    activation: Activation = Activation.SILU,
) -> Layer:
    """Makes the layer `gate_mul`(x W^T + b); it gives half as many numbers as W has rows. Adapters
    are those of `linear`.
    """
    gate_up = linear(weight, bias, loras)
    return lambda values, adapters=None: gate_mul(gate_up(values, adapters), activation)


def experts(weights: Experts) -> Layer:
    """Makes a feed-forward part of experts (see `pagefleet_kernels.experts`), which takes and gives
    [T, size]. Each is `gated`, then `linear`; their outputs are weighted and added up in ascending
    order, at least in float32, and rounded once. No adapter changes them.
    """
    score = linear(weights.router, weights.router_bias)
    gates = [
        gated(part, bias, activation=weights.activation)
        for part, bias in weights.parts(weights.gate_up, weights.gate_up_bias)
    ]
    downs = [linear(*part) for part in weights.parts(weights.down, weights.down_bias)]

    def layer(values: Tensor, adapters: Tensor | None = None) -> Tensor:
        compute = torch.promote_types(values.dtype, torch.float32)
        taken, factors = route(score(values).to(compute), weights.routing, weights.correction)
        total = torch.zeros_like(values, dtype=compute)
        for number, (gate, down) in enumerate(zip(gates, downs, strict=True)):
            rows, places = (taken == number).nonzero(as_tuple=True)
            output = down(gate(values[rows])).to(compute)
            total[rows] += factors[rows, places].unsqueeze(1) * output
        return total.to(values.dtype)

    return layer


def head(weight: Matrix) -> Layer:
    """Makes the layer y = x W^T, whose y is float32."""
    scores = linear(weight)
    return lambda values, adapters=None: scores(values, adapters).float()


def log_softmax(logits: Tensor) -> Tensor:
    """The logarithm of the softmax of each row: floats [n, V] -> the same."""
    return logits.log_softmax(-1)
