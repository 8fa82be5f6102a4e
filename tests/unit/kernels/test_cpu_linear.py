"""Packed linear layers against plain products, and their promise of equal bits."""

import random

import pytest
import torch

from pagefleet_kernels import cpu_linear, reference
from pagefleet_kernels.cpu_linear import PackedLinear
from pagefleet_kernels.cpu_packing import Arena
from pagefleet_kernels.layers import Activation
from tests.unit.kernels.paged_case import fresh_seed

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

SHAPES = [(1, 2), (96, 64), (100, 72), (33, 10), (576, 1536)]
"""(outputs, inputs)"""

COUNTS = [1, 2, 11, 12, 13, 40, 130]


def random_layer(dtype, outputs, inputs):
    torch.manual_seed(fresh_seed())
    weight, bias = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
    return weight.to(dtype), bias.to(dtype)


@DTYPES
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_float64(dtype, outputs, inputs):
    weight, bias = random_layer(dtype, outputs, inputs)
    layers = {
        cpu_linear.linear(weight, bias): bias.double(),
        cpu_linear.linear(weight): 0.0,
        cpu_linear.head(weight): 0.0,
    }
    for layer, added in layers.items():
        assert isinstance(layer, PackedLinear)
        for count in COUNTS:
            values = torch.randn(count, inputs).to(dtype)
            exact = values.double() @ weight.double().T + added
            output = layer(values)
            error = 1e-5 if output.dtype == torch.float32 else 2**-8
            torch.testing.assert_close(output.double(), exact, atol=1e-5, rtol=error)


@pytest.mark.parametrize("inputs", [576, 4096])
def test_errors_in_float32_do_not_grow_with_the_inputs(inputs):
    """They are no larger than those of torch, which adds up in another order."""
    weight, _ = random_layer(torch.float32, 96, inputs)
    values = torch.randn(40, inputs)
    exact = values.double() @ weight.double().T

    def error(output):
        return (output.double() - exact).square().mean().sqrt()

    assert error(cpu_linear.linear(weight)(values)) < 1.2 * error(values @ weight.T)


def test_scores_of_a_head_are_float32():
    weight, _ = random_layer(torch.bfloat16, 50, 32)
    assert cpu_linear.head(weight)(torch.ones(3, 32).bfloat16()).dtype == torch.float32


@DTYPES
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("size", [16, 48, 1536])
def test_gates_are_the_activation_of_the_product(dtype, activation, size):
    weight, bias = random_layer(dtype, 2 * size, 64)
    values = torch.randn(30, 64).to(dtype)
    output = cpu_linear.gated(weight, bias, (), activation)(values)
    expected = reference.gate_mul(cpu_linear.linear(weight, bias)(values), activation)
    torch.testing.assert_close(output, expected)


@DTYPES
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    weight, bias = random_layer(dtype, 100, 72)
    layers = (cpu_linear.linear(weight, bias), cpu_linear.head(weight))
    values = torch.randn(200, 72).to(dtype)
    for layer in layers:
        alone = torch.cat([layer(row) for row in values.split(1)])
        for _ in range(20):
            begin = random.randrange(200)
            end = random.randint(begin + 1, 200)
            assert torch.equal(layer(values[begin:end]), alone[begin:end])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads):
    weight, _ = random_layer(torch.bfloat16, 576, 256)
    values = torch.randn(100, 256).bfloat16()
    layer, before = cpu_linear.linear(weight), torch.get_num_threads()
    expected = layer(values)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(layer(values), expected)
    finally:
        torch.set_num_threads(before)


def test_an_arena_keeps_tensors_side_by_side():
    arena = Arena()
    tensors = [torch.rand(size) for size in (1, 100, Arena.CHUNK_BYTES // 4 + 1, 7)]
    kept = [arena.keep(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, kept, strict=True):
        assert torch.equal(tensor, copy)
        assert copy.data_ptr() % 64 == 0
    assert kept[1].data_ptr() - kept[0].data_ptr() == 64


def test_what_cannot_be_packed_goes_to_torch():
    values = torch.randn(3, 9)
    for weight in (torch.randn(4, 9).bfloat16(), torch.randn(4, 9).double()):
        layer = cpu_linear.linear(weight)
        assert not isinstance(layer, PackedLinear)
        assert torch.equal(
            layer(values.to(weight.dtype)), reference.linear(weight)(values.to(weight.dtype))
        )
    gated = cpu_linear.gated(torch.randn(24, 9))
    assert not isinstance(gated, PackedLinear)
    assert gated(values).shape == (3, 12)
