"""Packed experts against `reference.experts`, and their promise of equal bits."""

import random

import pytest
import torch

from pagefleet_kernels import cpu_experts, cpu_linear, reference
from pagefleet_kernels.cpu_experts import PackedExperts
from pagefleet_kernels.cpu_linear import Epilogue, PackedLinear
from pagefleet_kernels.experts import Experts, Routing
from pagefleet_kernels.quantized import Kind
from tests.unit.kernels.expert_case import ALL_ROUTINGS, biased, double, random_experts
from tests.unit.kernels.expert_ties import clear_values
from tests.unit.kernels.paged_case import fresh_seed

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(fresh_seed())


@DTYPES
@ALL_ROUTINGS
@pytest.mark.parametrize("change", [lambda experts: experts, biased], ids=["plain", "biased"])
def test_outputs_are_those_of_float64(dtype, choices, routing, change):
    experts = change(random_experts(choices, routing, 72, 48, dtype))
    layer, exact = cpu_experts.experts(experts), reference.experts(double(experts))
    assert isinstance(layer, PackedExperts)
    error = 1e-5 if dtype is torch.float32 else 2**-4
    for count in (1, 2, 13, 150):
        values = clear_values(experts, count, 2**-14)  # scores are float32, of 73 terms each
        found, expected = layer(values).double(), exact(values.double())
        largest = max(expected.abs().max().item(), 1)
        torch.testing.assert_close(found, expected, atol=error * largest, rtol=error)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, Kind.INT8),
        (torch.bfloat16, Kind.INT4),
        (torch.float32, Kind.E2M1),
        pytest.param(torch.float32, Kind.INT4, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, Kind.INT8, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_quantized_experts_are_quantized_layers_weighted(dtype, kind):
    """Each expert's outputs are those of dense layers, to the bit before they are added up."""
    routing = Routing(3, renormalized=True, shared=1)
    experts = biased(random_experts(9, routing, 64, 96, dtype, kind))
    gates = [
        cpu_linear.gated(part, bias, (), experts.activation)
        for part, bias in experts.parts(experts.gate_up, experts.gate_up_bias)
    ]
    downs = [
        PackedLinear(part, bias, Epilogue.WIDE)
        for part, bias in experts.parts(experts.down, experts.down_bias)
    ]
    values = torch.randn(40, 64).to(dtype)
    scores = PackedLinear(experts.router, experts.router_bias, Epilogue.WIDE)(values)
    expected = torch.zeros(40, 64)
    taken, factors = reference.route(scores, experts.routing)
    for row, (numbers, weights) in enumerate(zip(taken, factors, strict=True)):
        for number, weight in zip(numbers, weights, strict=True):
            expected[row] += weight * downs[number](gates[number](values[row : row + 1]))[0]
    found = cpu_experts.experts(experts)(values)
    torch.testing.assert_close(found, expected.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, Kind.INT8)],
    ids=str,
)
def test_a_row_has_the_same_bits_in_every_batch_on_any_threads(dtype, kind):
    experts = biased(random_experts(6, Routing(2, renormalized=True), 64, 32, dtype, kind))
    layer, before = cpu_experts.experts(experts), torch.get_num_threads()
    values = torch.randn(300, 64).to(dtype)
    alone = torch.cat([layer(row) for row in values.split(1)])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for _ in range(8):
                begin = random.randrange(300)
                end = random.randint(begin + 1, 300)
                assert torch.equal(layer(values[begin:end]), alone[begin:end])
    finally:
        torch.set_num_threads(before)


@DTYPES
def test_one_expert_may_get_all_rows(dtype):
    experts = random_experts(8, Routing(1, renormalized=True), 64, 32, dtype)
    experts.router[3] = 100
    values = torch.rand(250, 64).to(dtype)
    gate, down = (list(experts.parts(each))[3][0] for each in (experts.gate_up, experts.down))
    expected = cpu_linear.linear(down)(cpu_linear.gated(gate)(values))
    assert torch.equal(cpu_experts.experts(experts)(values), expected)


def test_of_equal_scores_the_first_are_taken():
    experts = random_experts(40, Routing(3, renormalized=True), 32, 16, torch.float32)
    experts.router.zero_()
    matrices = experts.gate_up, experts.down
    gate_up, down = (torch.cat([p for p, _ in list(experts.parts(m))[:3]]) for m in matrices)
    three = Experts(experts.router[:3], gate_up, down, experts.routing)
    values = torch.randn(20, 32)
    assert torch.equal(cpu_experts.experts(experts)(values), cpu_experts.experts(three)(values))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_no_number_stays_one_and_alone(bad):
    experts = random_experts(6, Routing(2, renormalized=False), 32, 16, torch.float32)
    layer, values = cpu_experts.experts(experts), torch.randn(30, 32)
    expected = layer(values)
    values[7, 3] = bad
    found = layer(values)
    assert found[7].isnan().any()
    others = torch.arange(30) != 7
    assert torch.equal(found[others], expected[others])


def test_what_cannot_be_packed_goes_to_torch():
    experts = random_experts(4, Routing(2, renormalized=True), 32, 12, torch.float32)
    layer = cpu_experts.experts(experts)
    assert not isinstance(layer, PackedExperts)
    values = torch.randn(5, 32)
    assert torch.equal(layer(values), reference.experts(experts)(values))
