"""Launches of the Triton kernels whose needs `triton_resources` shows: real models' shapes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagefleet_kernels.experts import Routing
from pagefleet_kernels.layers import Activation
from pagefleet_kernels.lora import Factors
from pagefleet_kernels.quantized import GROUP, Kind
from pagefleet_kernels.triton_activation import gate_mul
from pagefleet_kernels.triton_attention import attention
from pagefleet_kernels.triton_cache import copy_blocks, rotary_write_kv, write_kv
from pagefleet_kernels.triton_experts import PackedExperts, expert_sums
from pagefleet_kernels.triton_latents import product_by_heads, rotary_write_latents
from pagefleet_kernels.triton_logprobs import log_softmax
from pagefleet_kernels.triton_lora import HeldLoras
from pagefleet_kernels.triton_matmul import product
from pagefleet_kernels.triton_norm import add_rms_norm, rms_norm
from pagefleet_kernels.triton_packed import BLOCK, PackedMatrix
from pagefleet_kernels.triton_quantized import quantized_product
from pagefleet_kernels.triton_routing import route
from pagefleet_kernels.triton_sampling import sample
from pagefleet_kernels.triton_tiling import Chip, choose_tiling


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention_case(
    tokens: int,
    rows: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    *,
    invariant: bool = False,
    sloped: bool = False,
    sinking: bool = False,
    eight_bits: bool = False,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Callable[[Chip], object]:
    """A launch of attention over rows of up to 16,384 positions."""

    def run(chip: Chip) -> object:
        query = _empty(tokens, heads, head_size, dtype=dtype)
        kept = torch.uint8 if eight_bits else dtype
        cache = _empty(4096, kv_heads, block_size, head_size, dtype=kept)
        tables = _empty(rows, 16384 // block_size, dtype=torch.int32)
        starts, offsets = (_empty(n, dtype=torch.int32) for n in (rows, rows + 1))
        options["slopes"] = _empty(heads, dtype=torch.float32) if sloped else None
        options["sinks"] = _empty(heads, dtype=torch.float32) if sinking else None
        if eight_bits:
            options["kv_scales"] = _empty(2, kv_heads, dtype=torch.float32)
        tiling = choose_tiling(query, cache, tables, chip, invariant=invariant)
        arguments = (query, cache, cache, tables, starts, offsets)
        return attention(
            *arguments, scale=0.1, tiling=tiling, invariant=invariant, chip=chip, **options
        )

    return run


def _write_case(heads: int, kv_heads: int, head_size: int) -> Callable[[Chip], object]:
    def run(chip: Chip) -> None:
        query, key = _empty(64, heads, head_size), _empty(64, kv_heads, head_size)
        cache = _empty(4096, kv_heads, 16, head_size)
        places = _empty(64, dtype=torch.int64)
        cos_sin = _empty(4096, head_size, dtype=torch.float32)
        write_kv(key, key, cache, cache, places)
        rotary_write_kv(query, key, key, cos_sin, places, cache, cache, places)
        scales = _empty(2, kv_heads, dtype=torch.float32)
        cache = _empty(4096, kv_heads, 16, head_size, dtype=torch.uint8)
        write_kv(key, key, cache, cache, places, scales, chip=chip)
        arguments = (query, key, key, cos_sin, places, cache, cache, places, scales)
        rotary_write_kv(*arguments, chip=chip)
        copy_blocks(_empty(32, 2, 4096, kv_heads, 16, head_size), _empty(8, 2, dtype=torch.int64))

    return run


def _elementwise_case(hidden: int, inner: int) -> Callable[[Chip], object]:
    def run(_: Chip) -> None:
        values, weight = _empty(64, hidden), _empty(hidden)
        rms_norm(values, weight, 1e-5)
        add_rms_norm(values, values, weight, 1e-5)
        wide = _empty(hidden, dtype=torch.float32)
        add_rms_norm(values, values, wide, 1e-5, wide, 0.5)
        for activation in Activation:
            gate_mul(_empty(64, 2 * inner), activation)

    return run


def _product_case(rows: int, inputs: int, outputs: int) -> Callable[[Chip], object]:
    def run(chip: Chip) -> object:
        return product(_empty(rows, inputs), _empty(outputs, inputs), chip=chip)

    return run


def _packed(kind: Kind, outputs: int, inputs: int) -> PackedMatrix:
    blocks = -(-inputs // BLOCK)
    few = kind in (Kind.INT4, Kind.E2M1)
    numbers = _empty(blocks, outputs, BLOCK // 2, dtype=torch.uint8 if few else torch.int16)
    if kind is Kind.E4M3:
        scales = _empty(blocks, outputs, dtype=torch.float32)
        return PackedMatrix(kind, numbers, scales, None, inputs)
    factors = _empty(blocks, outputs, BLOCK // GROUP // 2, dtype=torch.int32)
    return PackedMatrix(kind, numbers, factors, factors if kind is Kind.INT4 else None, inputs)


def _quantized_case(
    rows: int, outputs: int, kind: Kind, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Callable[[Chip], object]:
    """4,096 inputs."""

    def run(chip: Chip) -> object:
        values, matrix = _empty(rows, 4096, dtype=dtype), _packed(kind, outputs, 4096)
        return quantized_product(values, matrix, chip=chip, **options)

    return run


def _lora_case(rows: int, inputs: int, parts: tuple[int, ...]) -> Callable[[Chip], object]:
    def run(_: Chip) -> None:
        down, first, factors = _empty(16, inputs), 0, []
        for outputs in parts:
            factors.append(Factors(first, down, _empty(outputs, 16), 1.0))
            first += outputs
        numbers = _empty(rows, dtype=torch.int32)
        HeldLoras([factors]).add(_empty(rows, first), _empty(rows, inputs), numbers)

    return run


def _expert_case(
    rows: int,
    choices: int,
    chosen: int,
    size: int,
    inner: int,
    *,
    kind: Kind | None = None,
    clamped: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Callable[[Chip], object]:
    def matrix(outputs: int, inputs: int) -> Tensor | PackedMatrix:
        if kind is None:
            return _empty(choices * outputs, inputs, dtype=dtype)
        return _packed(kind, choices * outputs, inputs)

    def run(chip: Chip) -> object:
        experts = PackedExperts(
            matrix(2 * inner, size),
            matrix(size, inner),
            _empty(choices * 2 * inner, dtype=dtype) if clamped else None,
            _empty(choices * size, dtype=dtype) if clamped else None,
            Activation.CLAMPED if clamped else Activation.SILU,
            choices,
        )
        routing = Routing(chosen, renormalized=True)
        taken, factors = route(_empty(rows, choices, dtype=dtype), routing)
        values = _empty(rows, size, dtype=dtype)
        return expert_sums(values, taken, factors, experts, chip=chip, **options)

    return run


def _sampling_case(vocabulary: int) -> Callable[[Chip], object]:
    def run(_: Chip) -> None:
        int32, float32 = _empty(64, dtype=torch.int32), _empty(64, dtype=torch.float32)
        int64, float64 = _empty(64, dtype=torch.int64), _empty(64, dtype=torch.float64)
        logits = _empty(64, vocabulary, dtype=torch.float32)
        sample(logits, int64, float32, int32, float64, float32, int64, int32, int32)
        log_softmax(logits)

    return run


def _latent_case(
    tokens: int,
    rows: int,
    heads: int,
    *,
    invariant: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[Chip], object]:
    """Attention over latents of DeepSeek's sizes, in rows of up to 16,384 positions."""

    def run(chip: Chip) -> object:
        cache = _empty(4096, 1, 16, 512 + 64, dtype=dtype)
        starts, offsets = (_empty(n, dtype=torch.int32) for n in (rows, rows + 1))
        tables = _empty(rows, 1024, dtype=torch.int32)
        query = _empty(tokens, heads, 512 + 64, dtype=dtype)
        caches = cache, cache[..., :512]
        options: dict[str, Any] = {"scale": 0.1, "invariant": invariant, "chip": chip}
        return attention(query, *caches, tables, starts, offsets, **options)

    return run


def _latent_layer_case(heads: int) -> Callable[[Chip], object]:
    def run(chip: Chip) -> object:
        query, places = _empty(64, heads, 128 + 64), _empty(64, dtype=torch.int64)
        entry = _empty(64, 512), _empty(64, 64), _empty(4096, 64, dtype=torch.float32)
        rotary_write_latents(query, *entry, places, _empty(4096, 1, 16, 512 + 64), places)
        return product_by_heads(query, _empty(heads, 512 + 64, 128 + 64), chip=chip)

    return run


GPT_OSS = (32, 4, 2880, 2880)
"""Experts, how many of them a row takes, hidden size and inner size of gpt-oss-20b."""

CASES: dict[str, Callable[[Chip], object]] = {
    "8B decode": _attention_case(64, 64, 32, 8, 128),
    "8B decode, one row": _attention_case(1, 1, 32, 8, 128),
    "8B prefill": _attention_case(2048, 3, 32, 8, 128),
    "8B decode, invariant": _attention_case(1, 1, 32, 8, 128, invariant=True),
    "8B prefill, invariant": _attention_case(8192, 3, 32, 8, 128, invariant=True),
    "8B decode, fp8": _attention_case(64, 64, 32, 8, 128, eight_bits=True),
    "8B prefill, fp8": _attention_case(2048, 3, 32, 8, 128, eight_bits=True),
    "135M decode": _attention_case(64, 64, 9, 3, 64),
    "135M prefill": _attention_case(2048, 3, 9, 3, 64),
    "Gemma 2 decode": _attention_case(64, 64, 16, 8, 256, softcap=50.0, block_size=32),
    "Gemma 2 prefill, window": _attention_case(2048, 3, 16, 8, 256, softcap=50.0, window=4096),
    "Gemma 2 prefill, invariant": _attention_case(8192, 3, 16, 8, 256, invariant=True),
    "ALiBi decode": _attention_case(64, 64, 32, 32, 80, sloped=True, block_size=64),
    "ALiBi prefill": _attention_case(2048, 3, 32, 32, 96, sloped=True),
    "gpt-oss decode": _attention_case(64, 64, 64, 8, 64, sinking=True),
    "gpt-oss decode, one row": _attention_case(1, 1, 64, 8, 64, sinking=True),
    "gpt-oss prefill, window": _attention_case(2048, 3, 64, 8, 64, sinking=True, window=128),
    "float32 prefill": _attention_case(2048, 3, 32, 8, 64, dtype=torch.float32),
    "DeepSeek-V3 decode": _latent_case(64, 64, 128),
    "DeepSeek-V3 prefill": _latent_case(2048, 3, 128),
    "DeepSeek-V3 prefill, invariant": _latent_case(8192, 3, 128, invariant=True),
    "DeepSeek-V2-Lite decode": _latent_case(64, 64, 16),
    "float32 latents": _latent_case(2048, 3, 16, dtype=torch.float32),
    "DeepSeek-V3 latents": _latent_layer_case(128),
    "8B writes": _write_case(32, 8, 128),
    "80-wide writes": _write_case(32, 32, 80),
    "8B layers": _elementwise_case(4096, 14336),
    "135M layers": _elementwise_case(576, 1536),
    "8B output, invariant": _product_case(64, 4096, 4096),
    "8B gate and up, invariant": _product_case(2048, 4096, 28672),
    "8B output, 4 bits, decode": _quantized_case(16, 4096, Kind.INT4),
    "8B output, 8 bits, decode": _quantized_case(16, 4096, Kind.INT8),
    "8B output, 4 bits, 64 rows": _quantized_case(64, 4096, Kind.INT4),
    "8B gate and up, 4 bits": _quantized_case(2048, 28672, Kind.INT4),
    "8B gate and up, 8 bits": _quantized_case(2048, 28672, Kind.INT8),
    "8B gate and up, e2m1": _quantized_case(2048, 28672, Kind.E2M1),
    "8B output, e4m3, decode": _quantized_case(16, 4096, Kind.E4M3),
    "8B gate and up, e4m3": _quantized_case(2048, 28672, Kind.E4M3),
    "8B output, 4 bits, invariant": _quantized_case(16, 4096, Kind.INT4, invariant=True),
    "float32 output, 4 bits": _quantized_case(2048, 4096, Kind.INT4, dtype=torch.float32),
    "8B queries, keys and values, adapters": _lora_case(64, 4096, (4096, 1024, 1024)),
    "8B down, adapters": _lora_case(2048, 14336, (4096,)),
    "30B-A3B experts, decode": _expert_case(64, 128, 8, 2048, 768),
    "30B-A3B experts, prefill": _expert_case(2048, 128, 8, 2048, 768),
    "30B-A3B experts, 4 bits, decode": _expert_case(64, 128, 8, 2048, 768, kind=Kind.INT4),
    "30B-A3B experts, 4 bits, prefill": _expert_case(2048, 128, 8, 2048, 768, kind=Kind.INT4),
    "30B-A3B experts, 8 bits, decode": _expert_case(64, 128, 8, 2048, 768, kind=Kind.INT8),
    "30B-A3B experts, 8 bits, prefill": _expert_case(2048, 128, 8, 2048, 768, kind=Kind.INT8),
    "30B-A3B experts, e4m3, decode": _expert_case(64, 128, 8, 2048, 768, kind=Kind.E4M3),
    "30B-A3B experts, e4m3, prefill": _expert_case(2048, 128, 8, 2048, 768, kind=Kind.E4M3),
    "gpt-oss experts, decode": _expert_case(64, *GPT_OSS, kind=Kind.E2M1, clamped=True),
    "gpt-oss experts, prefill": _expert_case(2048, *GPT_OSS, kind=Kind.E2M1, clamped=True),
    "gpt-oss experts, widened, decode": _expert_case(64, *GPT_OSS, clamped=True),
    "gpt-oss experts, widened, prefill": _expert_case(2048, *GPT_OSS, clamped=True),
    "float32 experts": _expert_case(2048, 8, 2, 4096, 14336, dtype=torch.float32),
    "float32 experts, 4 bits": _expert_case(
        2048, 8, 2, 4096, 14336, kind=Kind.INT4, dtype=torch.float32
    ),
    "8x7B experts, invariant": _expert_case(1, 8, 2, 4096, 14336, invariant=True),
    "sampling": _sampling_case(128256),
}
