"""Rows for mixtures of experts whose choice no rounding can change."""

import torch
from torch import Tensor

from pagefleet_kernels import reference
from pagefleet_kernels.experts import Experts
from tests.unit.kernels.expert_case import double


def clear_values(experts: Experts, count: int, error: float) -> Tensor:
    """Random rows [count, size] that take the same experts wherever scores are off by `error` of
    the largest of their row, or of 1.
    """
    values = torch.randn(count, experts.router.shape[1]).to(experts.router.dtype)
    while (close := _nearest_tie(experts, values) <= 2 * error).any():
        values[close] = torch.randn_like(values[close])
    return values


def _nearest_tie(experts: Experts, values: Tensor) -> Tensor:
    """How far the worst that a row takes, of groups and of experts in them, is from the best that
    it leaves: [T], in units of its largest score, or of 1 (sigmoids are off by less than scores).
    """
    wide, routing = double(experts), experts.routing
    scores = reference.linear(wide.router, wide.router_bias)(values.double())
    worths = own = scores[:, : experts.choices]
    if wide.correction is not None:
        worths = own.sigmoid() + wide.correction
    groups = worths.unflatten(1, (routing.groups, -1))
    counted = 2 if routing.sigmoid else 1
    best = groups.topk(counted).values.sum(-1)
    closed = torch.ones_like(best, dtype=torch.bool)
    closed.scatter_(1, best.topk(routing.open_groups).indices, value=False)
    inside = groups.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(1)
    margins = (
        _margin(best, routing.open_groups) / counted,
        _margin(inside, routing.chosen),
    )
    return torch.minimum(*margins) / scores.abs().amax(1).clamp(min=1)


def _margin(worths: Tensor, count: int) -> Tensor:
    """Of the `count` best of [T, n] over the next; infinite where there is none."""
    if count == worths.shape[1]:
        return torch.full_like(worths[:, 0], torch.inf)
    last, following = worths.topk(count + 1).values[:, -2:].unbind(1)
    return last - following
