"""Are the Triton kernels right on this device? Each is compared with `reference` in float64.

Inputs are random, blocks lie in random order, and memory that no kernel may read holds NaN. An
error is the largest of |found - expected| / (1 + |expected|); what must be equal to the bit is
allowed 0. Import this after `TRITON_INTERPRET` is set, where it is to be set.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from pagefleet_kernels import reference
from pagefleet_kernels.lora import Factors
from pagefleet_kernels.quantized import GROUP, Quantized
from pagefleet_kernels.triton_activation import silu_mul
from pagefleet_kernels.triton_attention import attention
from pagefleet_kernels.triton_cache import copy_blocks, rotary_write_kv, write_kv
from pagefleet_kernels.triton_logprobs import log_softmax
from pagefleet_kernels.triton_lora import HeldLoras
from pagefleet_kernels.triton_matmul import product
from pagefleet_kernels.triton_norm import add_rms_norm, rms_norm
from pagefleet_kernels.triton_quantized import PackedGroups, quantized_product
from pagefleet_kernels.triton_sampling import sample
from pagefleet_kernels.triton_tiling import chip_of, choose_tiling

Rows: TypeAlias = Sequence[tuple[int, int]]
"""(position of the first new token, new tokens) of each row."""

DECODE: Rows = [(0, 1), (15, 1), (16, 1), (63, 1), (200, 1), (1030, 1)]
PREFILL: Rows = [(0, 1), (0, 17), (0, 150)]
MIXED: Rows = [(31, 1), (40, 33), (0, 5), (700, 1), (5, 0), (128, 64)]
LONG: Rows = [*MIXED, (2100, 3), (1020, 8)]

FAILURES = (RuntimeError, TritonError)
"""What a compiler, a launch or a device raises."""

ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""What an error may be, by the type that a kernel computes from and rounds to."""


@dataclass(frozen=True)
class Check:
    """How far one kernel was off in one case, and how far it may be."""

    kernel: str
    case: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the kernel is right here; an error of NaN is none that is allowed."""
        return self.error <= self.allowed


def reason(error: Exception) -> str:
    """The first line of an error's text, as a cell of a table."""
    return f"{error} ".splitlines()[0].replace("|", "/")


class Inputs:
    """Random numbers on one device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)

    def permutation(self, size: int) -> Tensor:
        """The numbers below `size`, int64."""
        return torch.randperm(size, generator=self._generator).to(self.device)

    def integers(self, *values: int) -> Tensor:
        """int32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def poisoned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """NaN."""
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device)


def attention_inputs(
    inputs: Inputs,
    rows: Rows,
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """The arguments of `attention`: query, caches, tables, starts, offsets."""
    needed = [-(-(start + count) // block_size) for start, count in rows]
    blocks = inputs.permutation(sum(needed) + 2).to(torch.int32)
    caches = inputs.poisoned(2, len(blocks), kv_heads, block_size, head_size, dtype=dtype)
    tables = torch.zeros(len(rows), max(needed) + 1, dtype=torch.int32, device=inputs.device)
    first = 0
    for table, length, (start, count) in zip(tables, needed, rows, strict=True):
        table[:length] = blocks[first : first + length]
        first += length
        positions = torch.arange(start + count, device=inputs.device)
        block, within = table[positions // block_size].long(), positions % block_size
        for cache in caches:
            cache[block, :, within] = inputs.normal(start + count, kv_heads, head_size, dtype=dtype)
    counts = [count for _, count in rows]
    return (
        inputs.normal(sum(counts), heads, head_size, dtype=dtype),
        caches[0],
        caches[1],
        tables,
        inputs.integers(*(start for start, _ in rows)),
        torch.tensor([0, *counts], device=inputs.device).cumsum(0).to(torch.int32),
    )


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest relative-or-absolute error; NaN where only one of the two is NaN."""
    found, expected = found.double(), expected.double()
    both = found.isnan() & expected.isnan()
    errors = (found - expected).abs() / (1 + expected.abs())
    return float(errors.masked_fill(both, 0).max()) if errors.numel() else 0.0


def _attention(
    inputs: Inputs, rows: Rows, dtype: torch.dtype, shape: dict[str, int], **options: Any
) -> Check:
    arguments = attention_inputs(inputs, rows, dtype=dtype, **shape)
    options = {"scale": shape["head_size"] ** -0.5, **options}
    found = attention(*arguments, **options)
    options.pop("invariant", None)
    query, keys, values, *rest = arguments
    expected = reference.attention(query.double(), keys.double(), values.double(), *rest, **options)
    case = f"{shape['heads']}/{shape['kv_heads']} x {shape['head_size']}, {len(query)} tokens"
    return Check("attention", case, error_of(found, expected), ROUNDING[dtype])


def _invariant_attention(inputs: Inputs, dtype: torch.dtype, shape: dict[str, int]) -> Check:
    """Each row alone, which is split, against all rows together, which are not."""
    query, keys, values, tables, starts, offsets = attention_inputs(
        inputs, LONG, dtype=dtype, **shape
    )
    options: dict[str, Any] = {"scale": shape["head_size"] ** -0.5, "invariant": True}
    tiling = choose_tiling(query, keys, tables, chip_of(inputs.device), invariant=True)
    serial = replace(tiling, splits=1)
    together = attention(query, keys, values, tables, starts, offsets, tiling=serial, **options)
    alone = torch.empty_like(together)
    for row in range(len(starts)):
        first, last = offsets[row : row + 2].tolist()
        for token in range(first, last):
            start = starts[row : row + 1] + (token - first)
            one = query[token : token + 1], keys, values, tables[row : row + 1], start
            alone[token : token + 1] = attention(*one, inputs.integers(0, 1), **options)
    return Check("attention", "a row alone or in a batch", error_of(together, alone), 0.0)


def _eight_bits(inputs: Inputs, rows: Rows, dtype: torch.dtype, shape: dict[str, int]) -> Check:
    """Attention over caches of e4m3, and how many of the codes that `write_kv` stores differ."""
    query, keys, values, *rest = attention_inputs(inputs, rows, dtype=dtype, **shape)
    kv_heads, block_size = shape["kv_heads"], shape["block_size"]
    scales = 2.0 ** inputs.permutation(2 * kv_heads).view(2, kv_heads).float() / 32
    found = torch.full((2, *keys.shape), 0x7F, dtype=torch.uint8, device=inputs.device)
    expected = found.clone()
    slots = torch.arange(len(keys) * block_size, device=inputs.device)
    lines = [each.transpose(1, 2).reshape(-1, *each.shape[1::2]) for each in (keys, values)]
    write_kv(lines[0], lines[1], found[0], found[1], slots, scales)
    wide = [each.double() for each in lines]
    reference.write_kv(wide[0], wide[1], expected[0], expected[1], slots, scales)
    options: dict[str, Any] = {"scale": shape["head_size"] ** -0.5, "kv_scales": scales}
    exact = reference.attention(query.double(), expected[0], expected[1], *rest, **options)
    error = error_of(attention(query, expected[0], expected[1], *rest, **options), exact)
    case = f"e4m3, {shape['heads']}/{kv_heads} x {shape['head_size']}, {len(query)} tokens"
    same = torch.equal(found, expected)
    return Check("write_kv, attention", case, error if same else torch.inf, ROUNDING[dtype])


def _writes(inputs: Inputs, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> Check:
    """`write_kv` and `rotary_write_kv`: what is stored, and that nothing else is."""
    tokens, blocks, block_size = 37, 9, 16
    fused = inputs.normal(tokens, heads + 2 * kv_heads, size, dtype=dtype)
    query, key, value = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
    slots = inputs.permutation(blocks * block_size)[:tokens]
    positions = inputs.permutation(200)[:tokens]
    angles = inputs.normal(200, size // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    pool = inputs.poisoned(2, 2, blocks, kv_heads, block_size, size, dtype=dtype)
    expected = pool.double()
    write_kv(key, value, pool[0, 0], pool[0, 1], slots)
    wide = query.double(), key.double(), value.double()
    reference.write_kv(wide[1], wide[2], expected[0, 0], expected[0, 1], slots)
    places = positions, pool[1, 0], pool[1, 1], slots
    turned = rotary_write_kv(query, key, value, cos_sin, *places)
    places = positions, expected[1, 0], expected[1, 1], slots
    rotated = reference.rotary_write_kv(*wide, cos_sin.double(), *places)
    error = max(error_of(turned, rotated), error_of(pool, expected))
    return Check(
        "write_kv, rotary_write_kv", f"{heads}/{kv_heads} x {size}", error, ROUNDING[dtype]
    )


def _copies(inputs: Inputs, dtype: torch.dtype) -> Check:
    caches = inputs.normal(3, 2, 40, 8, 16, 128, dtype=dtype)
    blocks = inputs.permutation(40)
    pairs = torch.stack((blocks[:12], blocks[12:24]), dim=1)
    expected = caches.clone()
    reference.copy_blocks(expected, pairs)
    copy_blocks(caches, pairs)
    return Check("copy_blocks", "12 of 40 blocks", error_of(caches, expected), 0.0)


def _norms(inputs: Inputs, dtype: torch.dtype, size: int) -> Check:
    values, residual = (inputs.normal(37, size, dtype=dtype) for _ in range(2))
    weight = inputs.normal(size, dtype=dtype)
    found = rms_norm(values, weight, 1e-5), *add_rms_norm(values, residual, weight, 1e-5)
    added = values.double() + residual.double()
    expected = (
        reference.rms_norm(values.double(), weight.double(), 1e-5),
        reference.rms_norm(found[2].double(), weight.double(), 1e-5),
        added,
    )
    error = max(map(error_of, found, expected))
    return Check("rms_norm, add_rms_norm", f"37 x {size}", error, ROUNDING[dtype])


def _activation(inputs: Inputs, dtype: torch.dtype, size: int) -> Check:
    gate_up = inputs.normal(37, 2 * size, dtype=dtype) * 3
    error = error_of(silu_mul(gate_up), reference.silu_mul(gate_up.double()))
    return Check("silu_mul", f"37 x {size}", error, ROUNDING[dtype])


def _product(inputs: Inputs, dtype: torch.dtype, rows: int, width: int, outputs: int) -> Check:
    values = inputs.normal(rows, width, dtype=dtype)
    weight = inputs.normal(outputs, width, dtype=dtype) / width**0.5
    bias = inputs.normal(outputs, dtype=dtype)
    expected = values.double() @ weight.double().T + bias.double()
    error = error_of(product(values, weight, bias), expected)
    return Check("product", f"{rows} x {width} x {outputs}", error, ROUNDING[dtype])


def _invariant_product(inputs: Inputs, dtype: torch.dtype, width: int, outputs: int) -> Check:
    """Rows alone and in small batches, against all together."""
    values = inputs.normal(150, width, dtype=dtype)
    weight = inputs.normal(outputs, width, dtype=dtype)
    together = product(values, weight)
    error = 0.0
    for first, last in ((0, 1), (149, 150), (60, 70), (3, 140)):
        error += error_of(product(values[first:last], weight), together[first:last])
    return Check("product", "a row alone or in a batch", error, 0.0)


def random_matrix(inputs: Inputs, bits: int, outputs: int, width: int) -> Quantized:
    """Of weights of about 1 / sqrt(width)."""
    if bits == 8:
        return Quantized.of(inputs.normal(outputs, width) / width**0.5)
    numbers = inputs.normal(outputs, width).mul_(4).add_(8).clamp_(0, 15).to(torch.uint8)
    scales = inputs.normal(outputs, width // GROUP).abs_().add_(0.5) / (4 * width**0.5)
    return Quantized(numbers, scales.half(), (-7.3 * scales).half())


def _quantized_product(
    inputs: Inputs, dtype: torch.dtype, bits: int, rows: int, width: int, outputs: int
) -> Check:
    """With the weights as they are widened to the type of the inputs."""
    matrix = random_matrix(inputs, bits, outputs, width)
    values, bias = inputs.normal(rows, width, dtype=dtype), inputs.normal(outputs, dtype=dtype)
    weight = matrix.dequantized().to(dtype).double()
    expected = values.double() @ weight.T + bias.double()
    error = error_of(quantized_product(values, PackedGroups.of(matrix), bias), expected)
    case = f"{rows} x {width} x {outputs}, {bits} bits"
    return Check("quantized_product", case, error, ROUNDING[dtype])


def _invariant_quantized_product(inputs: Inputs, dtype: torch.dtype, width: int) -> Check:
    """Rows alone and in small batches, against all together."""
    values = inputs.normal(90, width, dtype=dtype)
    matrix = PackedGroups.of(random_matrix(inputs, 4, 96, width))
    together = quantized_product(values, matrix, invariant=True)
    error = 0.0
    for first, last in ((0, 1), (89, 90), (60, 70), (3, 80)):
        alone = quantized_product(values[first:last], matrix, invariant=True)
        error += error_of(alone, together[first:last])
    return Check("quantized_product", "a row alone or in a batch", error, 0.0)


def _adapters(inputs: Inputs, dtype: torch.dtype, rows: int, width: int, outputs: int) -> Check:
    """Of three adapters, one of which leaves half of the outputs alone; rows alone have the same
    bits.
    """
    loras = []
    for rank, halves in ((16, 2), (40, 1), (3, 2)):
        down = inputs.normal(rank, width, dtype=dtype) / width**0.5
        up = inputs.normal(outputs, rank, dtype=dtype) / rank**0.5
        loras.append([Factors(half * outputs, down, up, 0.7) for half in range(halves)])
    held = HeldLoras(loras)
    values, before = inputs.normal(rows, width, dtype=dtype), inputs.normal(rows, 2 * outputs)
    numbers = (torch.arange(rows, device=inputs.device) % 4).to(torch.int32)
    found = before.to(dtype)
    expected = found + reference.lora(values.double(), numbers, loras, 2 * outputs)
    alone = found.clone()
    held.add(found, values, numbers)
    for row in (0, rows // 2, rows - 1):
        one = slice(row, row + 1)
        held.add(alone[one], values[one], numbers[one])
        if not torch.equal(alone[one], found[one]):
            return Check("lora", "a row alone or in a batch", torch.inf, 0.0)
    error = error_of(found, expected)
    return Check("lora", f"{rows} x {width} x {outputs}", error, ROUNDING[dtype])


def _logprobs(inputs: Inputs, vocabulary: int) -> Check:
    logits = inputs.normal(9, vocabulary) * 4
    error = error_of(log_softmax(logits), logits.double().log_softmax(-1))
    alone = torch.cat([log_softmax(row) for row in torch.split(logits, 1)])
    same = torch.equal(log_softmax(logits), alone)
    return Check("log_softmax", f"9 x {vocabulary}", error if same else torch.inf, 1e-5)


def _greedy(inputs: Inputs, vocabulary: int) -> Check:
    logits = inputs.normal(8, vocabulary).to(torch.bfloat16).float()
    found = _drawn(inputs, logits, temperature=0.0)
    lowest = (logits == logits.amax(-1, True)).int().argmax(-1)
    return Check("sample", f"greedy, {vocabulary} ids", float((found != lowest).sum()), 0.0)


def _drawn(
    inputs: Inputs, logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """A draw from each row."""
    count, device = len(logits), logits.device
    return sample(
        logits,
        torch.arange(count, device=device),
        torch.full((count,), temperature, device=device),
        torch.full((count,), top_k, dtype=torch.int32, device=device),
        torch.full((count,), top_p, dtype=torch.float64, device=device),
        torch.zeros(count, device=device),
        torch.arange(count, device=device) * 2**40,
        torch.zeros(count, dtype=torch.int32, device=device),
        torch.arange(count, dtype=torch.int32, device=device),
    )


def _uniform(inputs: Inputs, count: int) -> Check:
    """Of 4,096 equally likely tokens the id is the upper 12 bits of Philox: their mean, in units of
    its standard deviation, and whether the same draws come again.
    """
    found = _drawn(inputs, torch.zeros(count, 4096, device=inputs.device), temperature=1.0)
    again = _drawn(inputs, torch.zeros(count, 4096, device=inputs.device), temperature=1.0)
    deviation = (4096**2 / 12 / count) ** 0.5
    error = abs(float(found.double().mean()) - 2047.5) / deviation
    return Check("sample", "uniform, again", error if torch.equal(found, again) else torch.inf, 5.0)


def _cut(inputs: Inputs, vocabulary: int, top_k: int, top_p: float) -> Check:
    """How many draws lie outside what float64 leaves, give or take what float32 cannot tell."""
    logits = inputs.normal(16, vocabulary) * 2
    found = _drawn(inputs, logits, 0.8, top_k, top_p)
    masses = torch.softmax(logits.double() / 0.8, -1)
    values, order = masses.sort(-1, descending=True)
    if top_k:
        values[:, top_k:] = 0
    before = values.cumsum(-1) - values
    kept = (values > 0) & (before < top_p * values.sum(-1, True) + 1e-5)
    allowed = torch.zeros_like(kept).scatter_(-1, order, kept)
    chosen = allowed.gather(-1, found.clamp(0, vocabulary - 1).unsqueeze(-1)).squeeze(-1)
    outside = (found < 0) | (found >= vocabulary) | ~chosen
    case = f"top-k {top_k}, top-p {top_p}, {vocabulary} ids"
    return Check("sample", case, float(outside.sum()), 0.0)


_LLAMA = {"heads": 32, "kv_heads": 8, "head_size": 128, "block_size": 16}
_SMALL = {"heads": 4, "kv_heads": 2, "head_size": 64, "block_size": 16}


def _quick(inputs: Inputs) -> Iterator[partial[Check]]:
    """A few seconds in the interpreter."""
    for rows in (DECODE[:4], MIXED[:3]):
        yield partial(_attention, inputs, rows, torch.float32, _SMALL)
    yield partial(_eight_bits, inputs, MIXED[:3], torch.float32, _SMALL)
    yield partial(_writes, inputs, torch.float32, 4, 2, 64)
    yield partial(_copies, inputs, torch.bfloat16)
    yield partial(_norms, inputs, torch.float32, 576)
    yield partial(_activation, inputs, torch.float32, 1536)
    yield partial(_product, inputs, torch.float32, 70, 100, 90)
    yield partial(_invariant_product, inputs, torch.float32, 100, 40)
    yield partial(_quantized_product, inputs, torch.float16, 4, 3, 1056, 70)
    yield partial(_quantized_product, inputs, torch.float32, 8, 20, 96, 90)
    yield partial(_invariant_quantized_product, inputs, torch.float32, 160)
    yield partial(_adapters, inputs, torch.float32, 20, 70, 50)
    yield partial(_logprobs, inputs, 3000)
    yield partial(_greedy, inputs, 1000)
    yield partial(_uniform, inputs, 16)
    yield partial(_cut, inputs, 600, 20, 0.9)


def _attention_checks(inputs: Inputs) -> Iterator[partial[Check]]:
    bfloat16, float16 = torch.bfloat16, torch.float16
    for rows in (DECODE, PREFILL, MIXED):
        yield partial(_attention, inputs, rows, bfloat16, _LLAMA)
        yield partial(_attention, inputs, rows, float16, _LLAMA | {"block_size": 32})
    for rows in (DECODE, MIXED):
        yield partial(_eight_bits, inputs, rows, bfloat16, _LLAMA)
    for options in ({"window": 100}, {"softcap": 30.0}, {"invariant": True}):
        for rows in (DECODE, MIXED):
            yield partial(_attention, inputs, rows, bfloat16, _LLAMA, **options)
    yield partial(_invariant_attention, inputs, bfloat16, _LLAMA)
    slopes = torch.linspace(0.01, 0.5, 32, device=inputs.device)
    yield partial(_attention, inputs, MIXED, bfloat16, _LLAMA, slopes=slopes)
    yield partial(_attention, inputs, MIXED, torch.float32, _SMALL)
    for size, block_size in ((64, 64), (80, 16), (96, 32), (256, 16)):
        shape = {"heads": 8, "kv_heads": 2, "head_size": size, "block_size": block_size}
        for rows in (DECODE, MIXED):
            yield partial(_attention, inputs, rows, bfloat16, shape)


def _layer_checks(inputs: Inputs) -> Iterator[partial[Check]]:
    for dtype in (torch.bfloat16, torch.float32):
        yield partial(_writes, inputs, dtype, 32, 8, 128)
        yield partial(_writes, inputs, dtype, 4, 4, 80)
        yield partial(_norms, inputs, dtype, 4096)
        yield partial(_norms, inputs, dtype, 80)
        yield partial(_activation, inputs, dtype, 14336)
        for count in (1, 64, 200):
            yield partial(_product, inputs, dtype, count, 4096, 6144)
            yield partial(_adapters, inputs, dtype, count, 4096, 3072)
            for bits in (4, 8):
                yield partial(_quantized_product, inputs, dtype, bits, count, 4096, 6144)
    yield partial(_quantized_product, inputs, torch.float16, 4, 17, 14336, 4096)
    yield partial(_quantized_product, inputs, torch.bfloat16, 4, 5, 96, 33)
    yield partial(_invariant_product, inputs, torch.bfloat16, 4096, 4096)
    yield partial(_invariant_quantized_product, inputs, torch.bfloat16, 4096)
    yield partial(_copies, inputs, torch.bfloat16)


def _sampling_checks(inputs: Inputs) -> Iterator[partial[Check]]:
    yield partial(_logprobs, inputs, 128256)
    yield partial(_greedy, inputs, 128256)
    yield partial(_uniform, inputs, 4000)
    for top_k, top_p in ((50, 1.0), (0, 0.9), (40, 0.95), (3000, 1.0)):
        yield partial(_cut, inputs, 128256, top_k, top_p)


_GROUPS = {
    "attention": _attention_checks,
    "layers": _layer_checks,
    "sampling": _sampling_checks,
}


def checks(device: torch.device, seed: int, *, quick: bool, group: str = "") -> Iterator[Check]:
    """Run every kernel, or those of one group; quick is what an interpreter does in seconds.

    A check that cannot be done is one that failed, with the reason as its case.
    """
    inputs = Inputs(device, seed)
    for run in (_quick if quick else _GROUPS[group])(inputs):
        try:
            yield run()
        except FAILURES as error:
            yield Check(run.func.__name__.strip("_"), reason(error), torch.inf, 0.0)
