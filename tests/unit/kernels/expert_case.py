"""Random mixtures of experts."""

from dataclasses import fields, replace

import pytest
import torch

from pagefleet_kernels.experts import Experts, Routing
from pagefleet_kernels.layers import Activation
from pagefleet_kernels.quantized import Kind, Quantized
from tests.unit.kernels.quantized_case import random_matrix

_PLAIN = [
    (5, Routing(1, renormalized=False)),
    (33, Routing(4, renormalized=True)),
    (17, Routing(3, renormalized=False, shared=2)),
    (4, Routing(4, renormalized=True)),
]
_GROUPED = [
    (20, Routing(3, renormalized=False, shared=1, weighted=False, groups=4, open_groups=2)),
    (24, Routing(5, renormalized=True, sigmoid=True, groups=6, open_groups=3, factor=2.5)),
    (7, Routing(2, renormalized=False, sigmoid=True)),
]
ROUTINGS = pytest.mark.parametrize(("choices", "routing"), _PLAIN)
ALL_ROUTINGS = pytest.mark.parametrize(("choices", "routing"), _PLAIN + _GROUPED)


def random_experts(
    choices: int,
    routing: Routing,
    size: int,
    inner: int,
    dtype: torch.dtype,
    kind: Kind | None = None,
) -> Experts:
    """With outputs of about the size of the inputs; matrices are plain without a `kind`."""
    count = choices + routing.shared

    def matrix(outputs: int, inputs: int):
        if kind is not None:
            return random_matrix(kind, count * outputs, inputs)
        return (torch.randn(count * outputs, inputs) / inputs**0.5).to(dtype)

    router = torch.randn(choices + routing.other_scores, size) / size**0.5
    correction = torch.randn(choices) if routing.sigmoid else None
    matrices = router.to(dtype), matrix(2 * inner, size), matrix(size, inner)
    return Experts(*matrices, routing, correction=correction)


def biased(experts: Experts) -> Experts:
    """The same with biases, and gates that are clamped now and then."""
    rows = {
        f"{name}_bias": getattr(experts, name).shape[0] for name in ("router", "gate_up", "down")
    }
    biases = {name: (3 * torch.randn(n)).to(experts.router.dtype) for name, n in rows.items()}
    return replace(experts, **biases, activation=Activation.CLAMPED)


def double(experts: Experts) -> Experts:
    """The same in float64; quantized matrices stay what they are."""
    values = {field.name: getattr(experts, field.name) for field in fields(experts)}
    wide = {name: v.double() for name, v in values.items() if isinstance(v, torch.Tensor)}
    return replace(experts, **wide)


def widened(experts: Experts) -> Experts:
    """The same with plain matrices, of the router's type."""
    plain = {
        name: matrix.dequantized().to(experts.router.dtype)
        for name, matrix in vars(experts).items()
        if isinstance(matrix, Quantized)
    }
    return replace(experts, **plain)
