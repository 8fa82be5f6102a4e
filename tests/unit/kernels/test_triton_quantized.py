"""Triton's product with quantized weights in Triton's interpreter."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_interpreter.py runs it, interpreted", allow_module_level=True)

import torch
from hypothesis import example, given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from pagefleet_kernels.dispatch import select
from pagefleet_kernels.quantized import E4M3_GROUP, GROUP, Kind
from pagefleet_kernels.triton_packed import PackedMatrix
from pagefleet_kernels.triton_quantized import quantized_product
from tests.unit.kernels.paged_case import fresh_seed
from tests.unit.kernels.quantized_case import random_matrix

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@example_settings(max_examples=12)
@given(
    rows=st.sampled_from([0, 1, 15, 16, 17, 63, 65]),
    groups=st.one_of(st.integers(1, 9), st.sampled_from([32, 33, 65])),
    outputs=st.sampled_from([1, 31, 32, 33, 70]),
    kind=st.sampled_from(Kind),
    dtype=st.sampled_from([*TOLERANCE]),
    biased=st.booleans(),
    invariant=st.booleans(),
)
@example(
    rows=3, groups=65, outputs=33, kind=Kind.INT4, dtype=torch.float32, biased=True, invariant=False
)  # in parts
def test_a_product_is_that_of_float64(rows, groups, outputs, kind, dtype, biased, invariant):
    """With the weights as they are widened to the type of the inputs."""
    torch.manual_seed(fresh_seed())
    inputs = groups * GROUP
    matrix = random_matrix(kind, outputs, inputs)
    values = torch.randn(rows, inputs + 5).to(dtype)[:, :inputs]
    bias = torch.randn(outputs).to(dtype) if biased else None
    found = quantized_product(values, PackedMatrix.of(matrix), bias, invariant=invariant)
    weight = matrix.dequantized().to(dtype).double()
    expected = values.double() @ weight.T + (bias.double() if biased else 0)
    assert found.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # bfloat16 is cut off here
def test_weights_are_those_that_are_widened(kind, dtype):
    """To the bit: what single inputs are multiplied by."""
    torch.manual_seed(fresh_seed())
    matrix = random_matrix(kind, 40, 3 * GROUP)
    found = quantized_product(torch.eye(3 * GROUP).to(dtype), PackedMatrix.of(matrix))
    assert torch.equal(found.T, matrix.dequantized().to(dtype))


def test_a_matrix_takes_as_many_bytes_as_its_numbers():
    bits = {
        Kind.INT4: 4 + 32 / GROUP,
        Kind.INT8: 8 + 16 / GROUP,
        Kind.E2M1: 4 + 16 / GROUP,
        Kind.E4M3: 8 + 32 / E4M3_GROUP,
    }
    for kind in Kind:
        matrix = PackedMatrix.of(random_matrix(kind, 64, 256))
        assert matrix.nbytes == 64 * 256 * bits[kind] // 8


@pytest.mark.parametrize("kind", Kind)
def test_a_row_has_the_same_bits_in_every_batch(kind):
    torch.manual_seed(fresh_seed())
    matrix, values = PackedMatrix.of(random_matrix(kind, 40, 160)), torch.randn(90, 160)
    together = quantized_product(values, matrix, invariant=True)
    for first, last in ((0, 1), (89, 90), (20, 90), (63, 66)):
        alone = quantized_product(values[first:last], matrix, invariant=True)
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("invariant", [False, True])
def test_layers_are_made_of_it(invariant):
    torch.manual_seed(fresh_seed())
    kernels = select(torch.device("cuda"), invariant=invariant)
    matrix, bias, values = random_matrix(Kind.INT4, 64, 96), torch.randn(64), torch.randn(3, 96)
    expected = values @ matrix.dequantized().T
    torch.testing.assert_close(kernels.head(matrix)(values), expected)
    torch.testing.assert_close(kernels.linear(matrix, bias)(values), expected + bias)
    gate, up = (expected + bias).chunk(2, dim=1)
    activated = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(kernels.gated(matrix, bias)(values), activated)
