"""Matrices in groups of a few kind, and the compiled products with them against plain ones."""

import random

import pytest
import torch

from pagefleet_kernels import cpu_layers, cpu_linear, reference
from pagefleet_kernels.cpu_grouped import BLOCK_BYTES
from pagefleet_kernels.cpu_linear import PackedLinear
from pagefleet_kernels.quantized import GROUP, Kind, Quantized, quantize_rows, round_rows
from tests.unit.kernels.paged_case import fresh_seed
from tests.unit.kernels.quantized_case import HOST_KINDS, random_matrix

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
KINDS = pytest.mark.parametrize("kind", HOST_KINDS)

SHAPES = [(1, 32), (96, 64), (100, 96), (576, 1536)]
"""(outputs, inputs)"""


def test_eight_bits_are_the_nearest():
    torch.manual_seed(fresh_seed())
    weight = torch.randn(20, 96)
    matrix = Quantized.of(weight)
    steps = matrix.scales.float().repeat_interleave(GROUP, dim=1)
    assert matrix.kind is Kind.INT8
    assert ((matrix.dequantized() - weight).abs() <= steps * 0.51).all()
    again = Quantized.of(matrix.dequantized())
    torch.testing.assert_close(again.dequantized(), matrix.dequantized(), rtol=0.01, atol=1e-6)


def test_a_group_of_zeros_stays_zeros():
    assert not Quantized.of(torch.zeros(2, 64)).dequantized().any()
    assert not round_rows(torch.full((1, 32), 1e-40)).any()


@pytest.mark.parametrize("kind", Kind)
def test_matrices_are_stacked_and_cut_and_their_rows_reordered(kind):
    torch.manual_seed(fresh_seed())
    parts = [random_matrix(kind, outputs, 352) for outputs in (3, 5)]
    weights = torch.cat([part.dequantized() for part in parts])
    order = torch.randperm(8)
    stacked = Quantized.stacked(parts)
    assert stacked.kind is kind
    assert torch.equal(stacked.dequantized(), weights)
    assert torch.equal(stacked.rows(order).dequantized(), weights[order])
    for inputs in (slice(0, 128), slice(128, 352)):
        part = stacked.part(slice(2, 7), inputs)
        assert torch.equal(part.dequantized(), weights[2:7, inputs])


def test_inputs_that_are_no_whole_groups_are_refused():
    with pytest.raises(ValueError, match="Rows of 40 numbers cannot be quantized"):
        Quantized.of(torch.ones(2, 40))


@DTYPES
def test_rows_are_quantized_as_the_plain_twin_does(dtype):
    torch.manual_seed(fresh_seed())
    values = (torch.randn(11, 96) * torch.logspace(-42, 20, 11).unsqueeze(1)).to(dtype)
    blocks = cpu_layers.quantized(values).view(11, -1, BLOCK_BYTES)
    numbers, scales = quantize_rows(values, torch.float32)
    assert torch.equal(blocks[..., :4].contiguous().view(torch.float32)[..., 0], scales)
    assert torch.equal(blocks[..., 8:].view(torch.int8).flatten(1), numbers)
    sums = numbers.view(11, -1, GROUP).sum(-1, dtype=torch.int32)
    assert torch.equal(blocks[..., 4:8].contiguous().view(torch.int32)[..., 0], sums)


@KINDS
def test_the_largest_numbers_do_not_overflow(kind):
    """What is summed up in integers is exact, whatever the instructions have room for."""
    torch.manual_seed(fresh_seed())
    outputs, groups = 40, 3
    largest, extremes = (255, [0, 1, 127, 128, 255]) if kind is Kind.INT8 else (15, [0, 7, 8, 15])
    numbers = torch.tensor(extremes)[torch.randint(len(extremes), (outputs, groups * GROUP))]
    numbers[0], numbers[1] = 0, largest
    ones = torch.ones(outputs, groups)
    minimums = -ones.half() if kind is Kind.INT4 else None
    matrix = Quantized(numbers.to(torch.uint8), ones.half(), minimums, floats=kind is Kind.E2M1)
    values = torch.randint(2, (7, groups * GROUP)) * 254.0 - 127
    values[0] = values[0].abs()
    exact = values.double() @ matrix.dequantized().double().T
    assert torch.equal(cpu_linear.linear(matrix)(values).double(), exact)


@DTYPES
@KINDS
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_float64(dtype, kind, outputs, inputs):
    torch.manual_seed(fresh_seed())
    matrix, bias = random_matrix(kind, outputs, inputs), torch.randn(outputs).to(dtype)
    layers = {
        cpu_linear.linear(matrix, bias): bias.double(),
        cpu_linear.linear(matrix): 0.0,
        cpu_linear.head(matrix): 0.0,
    }
    for layer, added in layers.items():
        for count in (1, 2, 11, 12, 13, 40):
            values = torch.randn(count, inputs).to(dtype)
            exact = round_rows(values).double() @ matrix.dequantized().double().T + added
            output = layer(values)
            error = 1e-5 if output.dtype == torch.float32 else 2**-8
            torch.testing.assert_close(output.double(), exact, atol=1e-5, rtol=error)


@DTYPES
@KINDS
def test_gates_are_those_of_the_plain_twin(dtype, kind):
    torch.manual_seed(fresh_seed())
    matrix, bias = random_matrix(kind, 96, 64), torch.randn(96).to(dtype)
    values = torch.randn(30, 64).to(dtype)
    output = cpu_linear.gated(matrix, bias)(values)
    error = 1e-5 if dtype == torch.float32 else 2**-6
    expected = reference.gated(matrix, bias)(values)
    torch.testing.assert_close(output, expected, atol=error, rtol=error)


@DTYPES
@KINDS
def test_a_row_has_the_same_bits_in_every_batch_on_any_threads(dtype, kind):
    torch.manual_seed(fresh_seed())
    layer = cpu_linear.linear(random_matrix(kind, 100, 96), torch.randn(100).to(dtype))
    assert isinstance(layer, PackedLinear)
    values, before = torch.randn(200, 96).to(dtype), torch.get_num_threads()
    alone = torch.cat([layer(row) for row in values.split(1)])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for _ in range(10):
                begin = random.randrange(200)
                end = random.randint(begin + 1, 200)
                assert torch.equal(layer(values[begin:end]), alone[begin:end])
    finally:
        torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize("unusual", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_row_alone(dtype, unusual):
    values = torch.ones(3, 64).to(dtype)
    values[1, 40] = unusual
    scores = cpu_linear.head(random_matrix(Kind.INT8, 40, 64))(values)
    assert scores[[0, 2]].isfinite().all()
    assert not scores[1].isfinite().any()
