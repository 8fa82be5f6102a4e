"""Which experts rows take, in plain torch: a part of `reference`."""

import torch
from torch import Tensor

from pagefleet_kernels.experts import SMALLEST_WEIGHT, Routing


def route(
    scores: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Which experts the rows take, and their weights (see `pagefleet_kernels.experts`).

    Args:
        scores: floats [T, experts to choose from], and one more if it weighs shared experts; of
            equal ones the first is the better.
        correction: [experts to choose from], of sigmoids.

    Returns:
        int64 [T, taken], each row's in ascending order, and their weights in the dtype of `scores`.
    """
    choices = scores.shape[1] - routing.other_scores
    own = worths = scores[:, :choices]
    weights = own.sigmoid() if routing.sigmoid else own.softmax(-1)
    if routing.sigmoid:
        worths = weights if correction is None else weights + correction
    taken = _best(_in_open_groups(worths, routing), routing.chosen)
    weights = weights.gather(1, taken)
    if routing.renormalized:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_WEIGHT * routing.sigmoid)
    weights = weights * routing.factor
    if not routing.shared:
        return taken, weights
    shared = torch.arange(choices, choices + routing.shared, device=scores.device)
    counting = scores[:, choices:].sigmoid() if routing.weighted else torch.ones_like(own[:, :1])
    shared, counting = shared.expand(len(scores), -1), counting.expand(-1, routing.shared)
    return torch.cat([taken, shared], 1), torch.cat([weights, counting], 1)


def _best(worths: Tensor, count: int) -> Tensor:
    """The numbers of so many of each row, in ascending order."""
    order = worths.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(-1).values


def _in_open_groups(worths: Tensor, routing: Routing) -> Tensor:
    """The worths of experts, -inf of those in other groups."""
    if routing.groups == 1:
        return worths
    groups = worths.view(len(worths), routing.groups, -1)
    best = groups.sort(dim=-1, descending=True).values[..., : 2 if routing.sigmoid else 1].sum(-1)
    closed = torch.ones_like(best, dtype=torch.bool)
    closed.scatter_(1, _best(best, routing.open_groups), value=False)
    return groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
