"""What lies between attentions: norms, activations, products, and what adapters add to them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.correctness.comparison import ROUNDING, Check, Inputs, error_of
from pagefleet_kernels import reference
from pagefleet_kernels.experts import Experts, Routing
from pagefleet_kernels.layers import Activation, Layer
from pagefleet_kernels.lora import Factors
from pagefleet_kernels.quantized import E4M3_GROUP, GROUP, Kind, Matrix, Quantized
from pagefleet_kernels.triton_activation import gate_mul
from pagefleet_kernels.triton_experts import PackedExperts, expert_sums
from pagefleet_kernels.triton_lora import HeldLoras
from pagefleet_kernels.triton_matmul import product
from pagefleet_kernels.triton_norm import add_rms_norm, rms_norm
from pagefleet_kernels.triton_packed import PackedMatrix
from pagefleet_kernels.triton_quantized import quantized_product
from pagefleet_kernels.triton_routing import route


def quick(inputs: Inputs) -> Iterator[partial[Check]]:
    """A few seconds in the interpreter."""
    yield partial(_norms, inputs, torch.float32, 576)
    yield partial(_post_norms, inputs, torch.float32, 576)
    for activation in Activation:
        yield partial(_activation, inputs, torch.float32, 1536, activation)
    yield partial(_product, inputs, torch.float32, 70, 100, 90)
    yield partial(_invariant_product, inputs, torch.float32, 100, 40)
    yield partial(_quantized_product, inputs, torch.float16, Kind.INT4, 3, 1056, 70)
    yield partial(_quantized_product, inputs, torch.float32, Kind.INT8, 20, 96, 90)
    yield partial(_invariant_quantized_product, inputs, torch.float32, 160)
    yield partial(_adapters, inputs, torch.float32, 20, 70, 50)
    few = Routing(3, renormalized=True), 9
    for clamped in (False, True):
        yield partial(_experts, inputs, torch.float32, 20, *few, 70, 40, clamped=clamped)
    for kind in Kind:
        yield partial(_experts, inputs, torch.float32, 20, *few, 160, 96, kind=kind)


def full(inputs: Inputs) -> Iterator[partial[Check]]:
    """The shapes of models that are served, and their borders."""
    for dtype in (torch.bfloat16, torch.float32):
        yield partial(_norms, inputs, dtype, 4096)
        yield partial(_norms, inputs, dtype, 80)
        yield partial(_post_norms, inputs, dtype, 2304)
        for activation in Activation:
            yield partial(_activation, inputs, dtype, 9216, activation)
        for count in (1, 64, 200):
            yield partial(_product, inputs, dtype, count, 4096, 6144)
            yield partial(_adapters, inputs, dtype, count, 4096, 3072)
            for kind in Kind:
                yield partial(_quantized_product, inputs, dtype, kind, count, 4096, 6144)
    yield partial(_quantized_product, inputs, torch.float16, Kind.INT4, 17, 14336, 4096)
    yield partial(_quantized_product, inputs, torch.bfloat16, Kind.INT4, 5, 96, 33)
    yield partial(_invariant_product, inputs, torch.bfloat16, 4096, 4096)
    yield partial(_invariant_quantized_product, inputs, torch.bfloat16, 4096)
    for count in (1, 64, 2048):
        routing = Routing(8, renormalized=True)
        yield partial(_experts, inputs, torch.bfloat16, count, routing, 128, 2048, 768)
    for kind in Kind:
        yield partial(_experts, inputs, torch.bfloat16, 300, routing, 32, 2048, 768, kind=kind)
        yield partial(_widened_experts, inputs, torch.bfloat16, 2048, 768, kind)
    shared = Routing(4, renormalized=False, shared=4)
    yield partial(_experts, inputs, torch.float32, 37, shared, 60, 2048, 1408)
    four = Routing(4, renormalized=True)
    gpt_oss = four, 32, 2880, 2880
    yield partial(_experts, inputs, torch.bfloat16, 64, *gpt_oss, clamped=True)
    yield partial(_experts, inputs, torch.bfloat16, 64, *gpt_oss, clamped=True, kind=Kind.E2M1)
    for each in (None, Kind.E2M1):
        yield partial(_invariant_experts, inputs, torch.bfloat16, 2048, 768, each)


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


def _post_norms(inputs: Inputs, dtype: torch.dtype, size: int) -> Check:
    """What is added is normed too, with weights of float32; the residual is so small that errors of
    both norms show.
    """
    values, residual = (inputs.normal(37, size, dtype=dtype) for _ in range(2))
    weight, post = (1 + inputs.normal(size, dtype=torch.float32) / 4 for _ in range(2))
    found = add_rms_norm(values, residual / 64, weight, 1e-6, post, 0.5)
    wide = values.double(), residual.double() / 64, weight.double()
    expected = reference.add_rms_norm(*wide, 1e-6, post.double(), 0.5)
    error = max(map(error_of, found, expected))
    return Check("add_rms_norm, post", f"37 x {size}", error, 2 * ROUNDING[dtype])


def _activation(inputs: Inputs, dtype: torch.dtype, size: int, activation: Activation) -> Check:
    gate_up = inputs.normal(37, 2 * size, dtype=dtype) * 3
    exact = reference.gate_mul(gate_up.double(), activation)
    error = error_of(gate_mul(gate_up, activation), exact)
    case = f"37 x {size}, {activation.name.lower()}"
    return Check("gate_mul", case, error, ROUNDING[dtype])


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


def _random_experts(
    inputs: Inputs,
    dtype: torch.dtype,
    routing: Routing,
    choices: int,
    size: int,
    inner: int,
    *,
    clamped: bool = False,
    kind: Kind | None = None,
) -> Experts:
    """With a router that needs no matrix, as scores that are rounded choose others; if gates are
    `clamped` there are biases too.
    """
    count = choices + routing.shared

    def matrix(outputs: int, width: int) -> Matrix:
        if kind is None:
            return inputs.normal(count * outputs, width, dtype=dtype).div_(width**0.5)
        return _random_matrix(inputs, kind, count * outputs, width)

    router = inputs.normal(choices + (routing.shared > 0), size, dtype=dtype)
    matrices = matrix(2 * inner, size), matrix(size, inner)
    if not clamped:
        return Experts(router, *matrices, routing)
    biases = {
        "gate_up_bias": inputs.normal(count * 2 * inner, dtype=dtype),
        "down_bias": inputs.normal(count * size, dtype=dtype),
    }
    return Experts(router, *matrices, routing, activation=Activation.CLAMPED, **biases)


def _widened(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    return matrix.dequantized().to(dtype) if isinstance(matrix, Quantized) else matrix


def _wide_linear(weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Layer:
    wide = _widened(weight, dtype).double()
    return reference.linear(wide, None if bias is None else bias.double())


def _experts(
    inputs: Inputs,
    dtype: torch.dtype,
    rows: int,
    routing: Routing,
    choices: int,
    size: int,
    inner: int,
    kind: Kind | None = None,
    **options: bool,
) -> Check:
    """What rows take, by scores of float32, and a sum for each expert that one takes."""
    experts = _random_experts(inputs, dtype, routing, choices, size, inner, kind=kind, **options)
    values, scores = (
        inputs.normal(rows, size, dtype=dtype),
        inputs.normal(rows, len(experts.router)),
    )
    taken, factors = route(scores, routing)
    found = expert_sums(values, taken, factors, PackedExperts.of(experts))
    numbers, weights = reference.route(scores.double(), routing)
    expected = torch.zeros_like(values, dtype=torch.float64)
    gates = experts.parts(experts.gate_up, experts.gate_up_bias)
    downs = experts.parts(experts.down, experts.down_bias)
    for number, pair in enumerate(zip(gates, downs, strict=True)):
        gate_up, down = (_wide_linear(*each, dtype) for each in pair)
        own, places = (numbers == number).nonzero(as_tuple=True)
        inside = reference.gate_mul(gate_up(values[own].double()), experts.activation)
        expected[own] += weights[own, places].unsqueeze(1) * down(inside)
    case = f"{rows} rows, {routing.taken} of {experts.count} x {size} x {inner}{_named(kind)}"
    return Check("experts", case, error_of(found, expected), 4 * ROUNDING[dtype])


def _named(kind: Kind | None) -> str:
    return "" if kind is None else f", {kind.name.lower()}"


def _invariant_experts(
    inputs: Inputs, dtype: torch.dtype, size: int, inner: int, kind: Kind | None
) -> Check:
    """Rows alone and in small batches, against all together."""
    routing = Routing(2, renormalized=True)
    experts = PackedExperts.of(_random_experts(inputs, dtype, routing, 8, size, inner, kind=kind))
    values, scores = inputs.normal(300, size, dtype=dtype), inputs.normal(300, 8)
    taken, factors = route(scores, routing)

    def sums(first: int, last: int) -> Tensor:
        own = slice(first, last)
        return expert_sums(values[own], taken[own], factors[own], experts, invariant=True)

    together, error = sums(0, 300), 0.0
    for first, last in ((0, 1), (299, 300), (60, 70), (3, 240)):
        error += error_of(sums(first, last), together[first:last])
    return Check("experts", f"a row alone or in a batch{_named(kind)}", error, 0.0)


def _widened_experts(
    inputs: Inputs, dtype: torch.dtype, size: int, inner: int, kind: Kind
) -> Check:
    """Against the same kernels with the matrices that these stand for."""
    routing = Routing(2, renormalized=True)
    experts = _random_experts(inputs, dtype, routing, 8, size, inner, kind=kind)
    gate_up, down = (_widened(each, dtype) for each in (experts.gate_up, experts.down))
    values, scores = inputs.normal(300, size, dtype=dtype), inputs.normal(300, 8)
    taken, factors = route(scores, routing)
    found, expected = (
        expert_sums(values, taken, factors, PackedExperts.of(each))
        for each in (experts, replace(experts, gate_up=gate_up, down=down))
    )
    return Check("experts", f"as widened{_named(kind)}", error_of(found, expected), 0.0)


def _random_matrix(inputs: Inputs, kind: Kind, outputs: int, width: int) -> Quantized:
    """Of weights of about 1 / sqrt(width)."""
    if kind is Kind.INT8:
        return Quantized.of(inputs.normal(outputs, width) / width**0.5)
    if kind is Kind.E4M3:
        scales = inputs.normal(outputs, -(-width // E4M3_GROUP)).abs_().add_(0.5) / width**0.5
        return Quantized(inputs.normal(outputs, width).to(torch.float8_e4m3fn), scales)
    scales = inputs.normal(outputs, width // GROUP).abs_().add_(0.5) / (4 * width**0.5)
    numbers = inputs.normal(outputs, width).mul_(4).add_(8).clamp_(0, 15).to(torch.uint8)
    if kind is Kind.E2M1:
        return Quantized(numbers, scales.half(), floats=True)
    return Quantized(numbers, scales.half(), (-7.3 * scales).half())


def _quantized_product(
    inputs: Inputs, dtype: torch.dtype, kind: Kind, rows: int, width: int, outputs: int
) -> Check:
    """With the weights as they are widened to the type of the inputs."""
    matrix = _random_matrix(inputs, kind, outputs, width)
    values, bias = inputs.normal(rows, width, dtype=dtype), inputs.normal(outputs, dtype=dtype)
    expected = values.double() @ _widened(matrix, dtype).double().T + bias.double()
    error = error_of(quantized_product(values, PackedMatrix.of(matrix), bias), expected)
    case = f"{rows} x {width} x {outputs}{_named(kind)}"
    return Check("quantized_product", case, error, ROUNDING[dtype])


def _invariant_quantized_product(inputs: Inputs, dtype: torch.dtype, width: int) -> Check:
    """Rows alone and in small batches, against all together."""
    values = inputs.normal(90, width, dtype=dtype)
    matrix = PackedMatrix.of(_random_matrix(inputs, Kind.INT4, 96, width))
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
