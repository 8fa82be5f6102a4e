"""Triton's experts in Triton's interpreter, against `reference.experts` in float64."""

import os
from dataclasses import replace

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_interpreter.py runs it, interpreted", allow_module_level=True)

import torch

from pagefleet_kernels import dispatch, reference
from pagefleet_kernels.experts import Routing
from pagefleet_kernels.quantized import Kind
from pagefleet_kernels.triton_experts import TritonExperts
from pagefleet_kernels.triton_routing import route, sort_tiles
from tests.unit.kernels.expert_case import (
    ALL_ROUTINGS,
    ROUTINGS,
    biased,
    double,
    random_experts,
    widened,
)
from tests.unit.kernels.expert_ties import clear_values
from tests.unit.kernels.paged_case import fresh_seed

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2**-4}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(fresh_seed())


@ALL_ROUTINGS
def test_rows_take_what_they_take_in_the_reference(choices, routing):
    scores = torch.randn(40, choices + routing.other_scores)
    scores[3, 1] = scores[3, 2]
    scores[4] = 0
    correction = torch.randn(choices) if routing.sigmoid else None
    taken, factors = route(scores, routing, correction)
    order = taken.argsort(dim=1)
    numbers, weights = reference.route(scores, routing, correction)
    assert torch.equal(taken.gather(1, order).long(), numbers)
    torch.testing.assert_close(factors.gather(1, order), weights)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_no_number_takes_different_experts(bad):
    scores = torch.full((2, 7), bad)
    scores[1, 3:] = torch.randn(4)
    taken, _ = route(scores, Routing(5, renormalized=True))
    for row in taken.tolist():
        assert len(set(row) & set(range(7))) == 5


@pytest.mark.parametrize("experts", [1, 6, 40])
def test_every_entry_is_in_a_tile_of_its_expert(experts):
    for count in (1, 37, 300):
        taken = torch.randint(experts, (count, 1), dtype=torch.int32)
        if count == 300:
            taken[:] = experts - 1
        order, tiles = sort_tiles(taken, experts, 16)
        seen = []
        for expert, first, size in tiles.tolist():
            if size > 0:
                entries = order[first : first + size].tolist()
                assert entries == sorted(entries)
                assert (taken[entries] == expert).all()
                seen += entries
        assert sorted(seen) == list(range(count))


@pytest.mark.parametrize(
    ("dtype", "invariant", "kind"),
    [
        (torch.float32, True, None),
        (torch.float16, False, None),
        (torch.bfloat16, False, None),
        (torch.float32, False, Kind.INT4),
        (torch.bfloat16, True, Kind.E2M1),
    ],
    ids=str,
)
@ROUTINGS
def test_outputs_are_those_of_float64(choices, routing, dtype, invariant, kind):
    """With matrices as they are widened to the type of the inputs."""
    size, inner = (72, 40) if kind is None else (96, 32)
    experts = random_experts(choices, routing, size, inner, dtype, kind)
    if not invariant or routing.shared:
        experts = biased(experts)
    router = reference.linear(experts.router, experts.router_bias)
    layer = TritonExperts(experts, router, invariant=invariant)
    exact, error = reference.experts(double(widened(experts))), TOLERANCE[dtype]
    for count in (0, 1, 20):
        rounding = max(torch.finfo(dtype).eps, 2**-14)  # of scores, where a router rounds them
        values = clear_values(experts, count, rounding)
        expected, found = exact(values.double()), layer(values).double()
        largest = max(1, *expected.abs().flatten().tolist()) if count else 1
        torch.testing.assert_close(found, expected, atol=error * largest, rtol=error)


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("kind", Kind)
def test_few_bits_give_the_bits_of_the_matrices_that_they_stand_for(kind, invariant):
    """In the 16 bits of which the same number is multiplied at once."""
    experts = random_experts(5, Routing(2, renormalized=True), 160, 96, torch.float16, kind)
    experts, router = biased(experts), reference.linear(experts.router)
    layers = [
        TritonExperts(each, router, invariant=invariant) for each in (experts, widened(experts))
    ]
    for count in (1, 40):
        values = torch.randn(count, 160).half()
        found, expected = (layer(values) for layer in layers)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", [None, Kind.INT4])
def test_a_row_has_the_same_bits_in_every_batch(kind):
    experts = random_experts(6, Routing(2, renormalized=True), 64, 32, torch.float32, kind)
    router = experts.router.double().T
    layer = TritonExperts(
        experts, lambda values, adapters=None: (values.double() @ router).float(), invariant=True
    )
    values = torch.randn(70, 64)
    together = layer(values)
    for first, last in ((0, 1), (69, 70), (20, 50)):
        assert torch.equal(layer(values[first:last]), together[first:last])


def test_scores_of_sigmoids_are_not_rounded():
    """Two experts whose scores are one number in 16 bits."""
    routing = Routing(1, renormalized=True, sigmoid=True)
    experts = random_experts(2, routing, 64, 32, torch.bfloat16)
    experts.router.fill_(1)
    experts.router[1, 0] += 2**-7
    experts = replace(experts, correction=torch.zeros(2))
    values = torch.full((1, 64), 2**-5, dtype=torch.bfloat16)
    gate_up, down = (list(experts.parts(each))[1][0] for each in (experts.gate_up, experts.down))
    expected = reference.linear(down)(reference.gated(gate_up)(values))
    layer = dispatch.select(torch.device("cuda")).experts(experts)
    torch.testing.assert_close(layer(values), expected, rtol=2**-6, atol=2**-6)
