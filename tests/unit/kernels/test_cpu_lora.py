"""Packed layers with adapters against float64, and their promise of equal bits."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_kernels import cpu_linear, reference
from pagefleet_kernels.cpu_linear import PackedLinear
from pagefleet_kernels.quantized import Quantized
from tests.unit.kernels.lora_case import PARTS, random_adapters, random_loras

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def memory_that_nobody_wrote_is_poison():
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


def random_case(seed, name, inputs, dtype):
    """A weight, a bias, and three adapters."""
    torch.manual_seed(seed)
    random.seed(seed)
    parts = PARTS[name]
    weight = (torch.randn(sum(parts), inputs) / inputs**0.5).to(dtype)
    return weight, torch.randn(sum(parts)).to(dtype), random_loras(parts, inputs, 3, dtype)


def assert_near(found, expected, inner):
    """But for one rounding of the result, and one of every number between the factors."""
    error = 1e-5 if found.dtype is torch.float32 else 2**-7
    allowed = error * (4 + expected.abs()) + error / 2 * inner
    assert ((found.double() - expected).abs() <= allowed).all()


def inner_magnitude(values, adapters, loras, outputs):
    """The sum of |B| |inner| behind every output of an adapter."""
    total = torch.zeros(len(values), outputs, dtype=torch.float64)
    for number, factors in enumerate(loras, 1):
        for each in factors:
            inner = (values.double() @ each.down.double().T * each.scale).abs()
            part = (inner @ each.up.double().abs().T)[adapters == number]
            total[adapters == number, each.first : each.first + len(each.up)] += part
    return total


CASES = given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(PARTS)),
    inputs=st.sampled_from([2, 64, 300]),
    rows=st.integers(1, 40),
)


@DTYPES
@CASES
def test_products_are_those_of_float64(dtype, seed, name, inputs, rows):
    weight, bias, loras = random_case(seed, name, inputs, dtype)
    values, adapters = torch.randn(rows, inputs).to(dtype), random_adapters(3, rows)
    layer = cpu_linear.linear(weight, bias, loras)
    assert isinstance(layer, PackedLinear)
    exact = reference.linear(weight.double(), bias.double(), loras)
    expected, found = exact(values.double(), adapters), layer(values, adapters)
    assert_near(found, expected, inner_magnitude(values, adapters, loras, len(weight)))
    assert torch.equal(found[adapters == 0], cpu_linear.linear(weight, bias)(values)[adapters == 0])
    alone = [layer(*each) for each in zip(values.split(1), adapters.split(1), strict=True)]
    assert torch.equal(found, torch.cat(alone))
    assert torch.equal(layer(values), cpu_linear.linear(weight, bias)(values))


@DTYPES
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 40))
def test_gates_are_the_activation_of_the_product(dtype, seed, rows):
    weight, bias, loras = random_case(seed, "gates", 64, dtype)
    values, adapters = torch.randn(rows, 64).to(dtype), random_adapters(3, rows)
    found = cpu_linear.gated(weight, bias, loras)(values, adapters)
    expected = reference.gate_mul(cpu_linear.linear(weight, bias, loras)(values, adapters))
    torch.testing.assert_close(found, expected)


@DTYPES
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 40))
def test_quantized_weights_keep_their_adapters(dtype, seed, rows):
    """What adapters add is made of the rows before these are quantized."""
    weight, _, loras = random_case(seed, "heads", 64, dtype)
    weight = Quantized.of(weight.float())
    values, adapters = torch.randn(rows, 64).to(dtype), random_adapters(3, rows)
    added = reference.lora(values.double(), adapters, loras, len(weight.numbers))
    expected = reference.linear(weight)(values.float()) + added
    found = cpu_linear.linear(weight, None, loras)(values, adapters)
    outputs = len(weight.numbers)
    assert_near(found, expected, inner_magnitude(values, adapters, loras, outputs))


def test_a_row_that_is_no_number_harms_no_other():
    weight, bias, loras = random_case(0, "heads", 64, torch.float32)
    values, adapters = torch.randn(20, 64), torch.arange(20, dtype=torch.int32) % 2
    layer = cpu_linear.linear(weight, bias, loras)
    expected = layer(values, adapters)
    values[3] = torch.nan
    found = layer(values, adapters)
    assert found[3].isnan().all()
    others = torch.arange(20) != 3
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads):
    weight, bias, loras = random_case(1, "heads", 300, torch.bfloat16)
    values, adapters = torch.randn(100, 300).bfloat16(), random_adapters(3, 100)
    layer, before = cpu_linear.linear(weight, bias, loras), torch.get_num_threads()
    expected = layer(values, adapters)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(layer(values, adapters), expected)
    finally:
        torch.set_num_threads(before)


def test_what_cannot_be_packed_has_adapters_too():
    weight, bias, loras = random_case(2, "one", 9, torch.bfloat16)
    values, adapters = torch.randn(5, 9).bfloat16(), random_adapters(3, 5)
    layer = cpu_linear.linear(weight, bias, loras)
    assert not isinstance(layer, PackedLinear)
    assert torch.equal(
        layer(values, adapters), reference.linear(weight, bias, loras)(values, adapters)
    )
