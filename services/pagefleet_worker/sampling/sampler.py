"""Chooses tokens from logits, for all draws of a step at once, as each request's parameters say.

A draw's logits are shaped (`shaping`: masks, bias, penalties), then divided by the temperature,
then cut: top-k first, top-p over what top-k left, then min-p. The sets are those of transformers'
warpers: top-k keeps whatever equals the k-th, top-p the most likely tokens until p is reached
(Holtzman and others, "The curious case of neural text degeneration", 2020, section 3.1; of equal
ones the lower id goes first), min-p what has at least that share of the best token's probability
(Nguyen and others, "Turning up the heat", 2024, section 3). What is left is drawn from by inverse
transform with u = f(seed, choice, position) (`philox`), through the tokens in the order of their
ids. A greedy draw takes the most likely token, the lowest id of equal ones.

A draw's token is the same, bit for bit, in whatever batch it is (`selection`).

Where the device has a kernel that does all of this but the shaping, the host sends it a column of
parameters for each draw, and waits for nothing.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet.params import SamplingParams
from pagefleet_worker.paging.transfer import all_to_device, to_device
from pagefleet_worker.sampling import philox
from pagefleet_worker.sampling.draw import NO_TOKEN, Draw
from pagefleet_worker.sampling.selection import (
    chunk_rows,
    inverse_transform,
    largest,
    top,
    weights_of,
)
from pagefleet_worker.sampling.shaping import shape

SampleKernel: TypeAlias = Callable[..., Tensor]
"""`pagefleet_kernels.triton_sampling.sample`, or one of its signature."""

_HEAD = 256
"""Most likely tokens among which top-k and top-p are sought at first."""

_HEAD_GROWTH = 16
"""How many times more are looked at where these do not decide."""


def sample(logits: Tensor, draws: Sequence[Draw], kernel: SampleKernel | None = None) -> Tensor:
    """The token of each draw, or `NO_TOKEN`: [L, V] float32 -> [len(draws)] int64, same device.

    The logits stay as they are. `kernel`: what chooses, instead of torch's operations.

    Raises:
        IndexError: a parameter or a history names a token outside the vocabulary.
    """
    if kernel is not None:
        return _sample_by(kernel, logits, draws)
    if all(draw.is_greedy and not draw.is_shaped for draw in draws):
        return _choose(logits, draws)
    size = chunk_rows(logits)
    chunks = [draws[start : start + size] for start in range(0, len(draws), size)]
    return torch.cat([_choose(logits, chunk) for chunk in chunks])


def _sample_by(kernel: SampleKernel, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    rows = np.array([draw.logits for draw in draws])
    if any(draw.is_shaped for draw in draws):
        logits = logits[to_device(rows, logits.device)]
        shape(logits, draws)
        rows = np.arange(len(draws))
    params = [draw.params for draw in draws]
    columns = [
        rows,
        np.array([each.temperature for each in params], np.float32),
        np.array([each.top_k for each in params], np.int32),
        np.array([each.top_p for each in params], np.float64),
        np.array([each.min_p for each in params], np.float32),
        np.array([each.seed for each in params], np.uint64).view(np.int64),
        np.array([draw.choice for draw in draws], np.int32),
        np.array([draw.position for draw in draws], np.int32),
    ]
    return kernel(logits, *all_to_device(columns, logits.device))


def _choose(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    scores = _scores(logits, draws)
    tokens = largest(scores)
    valid = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite()
    drawn = [row for row, draw in enumerate(draws) if not draw.is_greedy]
    if drawn:
        _put(tokens, drawn, _draw(_rows(scores, drawn), [draws[row] for row in drawn]))
    return tokens.where(valid, NO_TOKEN)


def random_bits(draws: Sequence[Draw]) -> NDArray[np.int64]:
    """`philox.draw_bits` of each draw."""
    seeds = np.array([draw.params.seed for draw in draws], dtype=np.uint64)
    key = np.stack((seeds & philox.WORD, seeds >> np.uint64(32)))
    even = np.zeros_like(key)
    odd = np.zeros_like(key)
    even[0] = [draw.position for draw in draws]
    odd[0] = [draw.choice for draw in draws]
    multipliers = np.array(philox.MULTIPLIERS, dtype=np.uint64)[:, None]
    steps = np.array(philox.KEY_STEPS, dtype=np.uint64)[:, None]
    for _ in range(philox.ROUNDS):
        products = (even * multipliers)[::-1]
        even, odd = products >> np.uint64(32) ^ odd ^ key, products & philox.WORD
        key = key + steps & philox.WORD
    bits: NDArray[np.int64] = (even[0] >> np.uint64(32 - philox.DRAW_BITS)).astype(np.int64)
    return bits


def _scores(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The shaped logits of each draw."""
    shaped = any(draw.is_shaped for draw in draws)
    rows = [draw.logits for draw in draws]
    scores = logits[rows] if shaped else _rows(logits, rows)
    if shaped:
        shape(scores, draws)
    return scores


def _rows(matrix: Tensor, rows: list[int]) -> Tensor:
    """Some rows, without a copy where they lie side by side."""
    start, end = (rows[0], rows[0] + len(rows)) if rows else (0, 0)
    return matrix[start:end] if rows == list(range(start, end)) else matrix[rows]


def _put(matrix: Tensor, rows: list[int], values: Tensor) -> None:
    matrix.index_copy_(0, torch.tensor(rows, device=matrix.device), values)


def _draw(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    weights = weights_left(scores, [draw.params for draw in draws])
    return inverse_transform(weights, torch.from_numpy(random_bits(draws)).to(scores.device))


def weights_left(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What temperature, top-k, top-p and min-p make of shaped logits [n, V] float32: weights
    [n, V] int32, 0 for what is cut.
    """
    scaled = scores / _column([each.temperature for each in params], scores.device)
    weights = weights_of(scaled)
    cut = [row for row, each in enumerate(params) if each.top_k or each.top_p < 1]
    if cut:
        asking = [params[row] for row in cut]
        _put(weights, cut, _top(_rows(scaled, cut), _rows(weights, cut), asking, _HEAD))
    if any(each.min_p for each in params):
        floors = _column([each.min_p for each in params], scores.device) * weights.amax(-1, True)
        weights.masked_fill_(weights < floors, 0)
    return weights


def _top(scores: Tensor, weights: Tensor, params: Sequence[SamplingParams], head: int) -> Tensor:
    """The weights [n, V] int32 with those outside top-k and top-p set to 0.

    Only the `head` most likely tokens are sorted. They decide a row if the cut falls among them;
    the other rows are done again with more.
    """
    size = scores.shape[-1]
    head = min(head, size)
    ids = top(scores, head)
    values, masses = scores.gather(-1, ids), weights.gather(-1, ids).to(torch.int64)
    top_k = torch.tensor([each.top_k for each in params], device=scores.device).unsqueeze(-1)
    limited = top_k > 0
    kth = values.gather(-1, (top_k - 1).clamp(0, head - 1))
    masses.masked_fill_(limited & (values < kth), 0)
    total = torch.where(limited, masses.sum(-1, True), weights.sum(-1, True))
    top_p = _column([each.top_p for each in params], scores.device, torch.float64)
    before = masses.cumsum(-1) - masses
    masses.masked_fill_(before >= top_p * total, 0)
    kept = torch.zeros_like(weights).scatter_(-1, ids, masses.to(torch.int32))
    decided = torch.where(limited, (top_k < head) & (values[:, -1:] < kth), masses[:, -1:] == 0)
    rest = (~decided.squeeze(-1)).nonzero().squeeze(-1).tolist()
    if rest and head < size:
        more = [params[row] for row in rest]
        _put(kept, rest, _top(scores[rest], weights[rest], more, head * _HEAD_GROWTH))
    return kept


def _column(
    values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(-1)
