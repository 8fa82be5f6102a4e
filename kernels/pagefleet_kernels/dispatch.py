"""Which kernels a worker runs: one place that looks at the device, so that no model has to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagefleet_kernels import reference
from pagefleet_kernels.experts import Experts
from pagefleet_kernels.layers import (
    Activation,
    DecoderLayer,
    HeadsLayer,
    Layer,
    Stack,
    StackShape,
)
from pagefleet_kernels.lora import Loras
from pagefleet_kernels.quantized import Kind, Matrix, Quantized


def _no_stack(layers: Sequence[DecoderLayer], norm: Tensor, shape: StackShape) -> None: ...


def _nothing_to_compile(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    query_heads: int,
    heads: int,
    head_size: int,
    latent: int = 0,
) -> None: ...


@dataclass(frozen=True)
class Kernels:
    """The operations of one device; each has the signature and the meaning of its namesake in
    `reference`.

    `warm_up(dtype, that of the pool, query heads, key/value heads, head size, that of values if
    keys are latents)` compiles everything that a model of this shape will call one by one, so that
    no step waits for a compiler.
    `stack(layers, norm, shape)` makes one call of all layers of a decoder, where
    the device gains by that. `sample` is `triton_sampling.sample`, where the device has that.
    `kinds`: of quantized matrices, those that are multiplied as they are.
    `invariant`: a row's bits do not depend on its batch.
    `block_multiple`: blocks must hold a multiple of so many tokens.
    """

    name: str
    attention: Callable[..., Tensor]
    write_kv: Callable[..., None]
    copy_blocks: Callable[[Tensor, Tensor], None]
    rotary_write_kv: Callable[..., Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    gate_mul: Callable[[Tensor, Activation], Tensor]
    linear: Callable[[Matrix, Tensor | None, Loras], Layer]
    gated: Callable[[Matrix, Tensor | None, Loras, Activation], Layer]
    head: Callable[[Matrix], Layer]
    rotary_write_latents: Callable[..., Tensor] = reference.rotary_write_latents
    by_heads: Callable[[Tensor], HeadsLayer] = reference.by_heads
    experts: Callable[[Experts], Layer] = reference.experts
    log_softmax: Callable[[Tensor], Tensor] = reference.log_softmax
    sample: Callable[..., Tensor] | None = None
    kinds: frozenset[Kind] = frozenset(Kind) - {Kind.E4M3}
    invariant: bool = True
    block_multiple: int = 1
    stack: Callable[[Sequence[DecoderLayer], Tensor, StackShape], Stack | None] = _no_stack
    warm_up: Callable[..., None] = _nothing_to_compile


REFERENCE = Kernels(
    "reference",
    attention=reference.attention,
    write_kv=reference.write_kv,
    copy_blocks=reference.copy_blocks,
    rotary_write_kv=reference.rotary_write_kv,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    gate_mul=reference.gate_mul,
    linear=reference.linear,
    gated=reference.gated,
    head=reference.head,
)


def select(device: torch.device, *, invariant: bool = False) -> Kernels:
    """The fastest kernels that run on `device`; `invariant` ones where it is asked for. Those of a
    CPU always are.
    """
    if device.type == "cuda":
        return _triton(invariant)
    return _cpu() if device.type == "cpu" else REFERENCE


def _triton(invariant: bool) -> Kernels:
    from pagefleet_kernels import (
        triton_activation,
        triton_attention,
        triton_cache,
        triton_experts,
        triton_jit,
        triton_latents,
        triton_logprobs,
        triton_lora,
        triton_matmul,
        triton_norm,
        triton_quantized,
        triton_sampling,
    )

    def product(weight: Matrix, bias: Tensor | None) -> Layer:
        if isinstance(weight, Quantized):
            return triton_quantized.QuantizedLinear(weight, bias, invariant=invariant)
        if invariant:
            return lambda values, adapters=None: triton_matmul.product(values, weight, bias)
        return reference.linear(weight, bias)

    def linear(weight: Matrix, bias: Tensor | None = None, loras: Loras = ()) -> Layer:
        plain = product(weight, bias)
        return triton_lora.adapted(plain, loras) if any(loras) else plain

    def gated(
        weight: Matrix,
        bias: Tensor | None = None,
        loras: Loras = (),
        activation: Activation = Activation.SILU,
    ) -> Layer:
        gate_up, gate_mul = linear(weight, bias, loras), triton_activation.gate_mul
        return lambda values, adapters=None: gate_mul(gate_up(values, adapters), activation)

    def head(weight: Matrix) -> Layer:
        scores = linear(weight)
        return lambda values, adapters=None: scores(values, adapters).float()

    def experts(weights: Experts) -> Layer:
        if not weights.routing.sigmoid:
            router = linear(weights.router, weights.router_bias)
            return triton_experts.TritonExperts(weights, router, invariant=invariant)
        bias = None if weights.router_bias is None else weights.router_bias.float()
        scores = linear(weights.router.float(), bias)  # corrections are finer than 16 bits

        def wide(values: Tensor, adapters: Tensor | None = None) -> Tensor:
            return scores(values.float())

        return triton_experts.TritonExperts(weights, wide, invariant=invariant)

    return Kernels(
        f"triton-{triton_jit.source_digest()}" + ("-invariant" if invariant else ""),
        attention=partial(triton_attention.attention, invariant=invariant),
        write_kv=triton_cache.write_kv,
        copy_blocks=triton_cache.copy_blocks,
        rotary_write_kv=triton_cache.rotary_write_kv,
        rms_norm=triton_norm.rms_norm,
        add_rms_norm=triton_norm.add_rms_norm,
        gate_mul=triton_activation.gate_mul,
        linear=linear,
        gated=gated,
        head=head,
        rotary_write_latents=triton_latents.rotary_write_latents,
        by_heads=lambda weights: partial(triton_latents.product_by_heads, weights=weights),
        experts=experts,
        log_softmax=triton_logprobs.log_softmax,
        sample=triton_sampling.sample,
        kinds=frozenset(Kind),
        invariant=invariant,
    )


def _cpu() -> Kernels:
    from pagefleet_kernels import (
        cpu_attention,
        cpu_cache,
        cpu_experts,
        cpu_latents,
        cpu_layers,
        cpu_linear,
        cpu_stack,
    )
    from pagefleet_kernels.cpu_rows import PANEL
    from pagefleet_kernels.cpu_store import VERSION

    def warm_up(
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        query_heads: int,
        heads: int,
        head_size: int,
        latent: int = 0,
    ) -> None:
        cpu_attention.warm_up(dtype, kv_dtype, query_heads, heads, head_size, latent)
        if latent:
            cpu_latents.warm_up(dtype)
        cpu_cache.warm_up(dtype, kv_dtype)
        cpu_layers.warm_up(dtype)
        cpu_linear.warm_up(dtype)

    return Kernels(
        f"numba-{VERSION}",
        attention=cpu_attention.attention,
        write_kv=cpu_cache.write_kv,
        copy_blocks=reference.copy_blocks,
        rotary_write_kv=cpu_cache.rotary_write_kv,
        rms_norm=cpu_layers.rms_norm,
        add_rms_norm=cpu_layers.add_rms_norm,
        gate_mul=cpu_layers.gate_mul,
        linear=cpu_linear.linear,
        gated=cpu_linear.gated,
        head=cpu_linear.head,
        rotary_write_latents=cpu_latents.rotary_write_latents,
        by_heads=cpu_linear.by_heads,
        experts=cpu_experts.experts,
        block_multiple=PANEL,
        stack=cpu_stack.stack,
        warm_up=warm_up,
    )
