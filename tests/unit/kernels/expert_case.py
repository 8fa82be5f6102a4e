"""Random mixtures of experts."""

import pytest
import torch

from pagefleet_kernels.experts import Experts, Routing
from tests.unit.kernels.quantized_case import random_matrix

ROUTINGS = pytest.mark.parametrize(
    ("choices", "routing"),
    [
        (5, Routing(1, renormalized=False)),
        (33, Routing(4, renormalized=True)),
        (17, Routing(3, renormalized=False, shared=2)),
        (4, Routing(4, renormalized=True)),
    ],
)


def random_experts(
    choices: int, routing: Routing, size: int, inner: int, dtype: torch.dtype, bits: int = 0
) -> Experts:
    """With outputs of about the size of the inputs; `bits` of the matrices, if they are few."""
    count = choices + routing.shared

    def matrix(outputs: int, inputs: int):
        if bits:
            return random_matrix(bits, count * outputs, inputs)
        return (torch.randn(count * outputs, inputs) / inputs**0.5).to(dtype)

    router = torch.randn(choices + (routing.shared > 0), size) / size**0.5
    return Experts(router.to(dtype), matrix(2 * inner, size), matrix(size, inner), routing)


def double(experts: Experts) -> Experts:
    """The same in float64; quantized matrices stay what they are."""
    router, gate_up, down = (
        each.double() if isinstance(each, torch.Tensor) else each
        for each in (experts.router, experts.gate_up, experts.down)
    )
    return Experts(router, gate_up, down, experts.routing)
