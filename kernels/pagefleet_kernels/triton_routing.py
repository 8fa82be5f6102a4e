"""Who goes to which expert, on GPUs, in Triton: `reference.route`, and then a sort.

Each row is routed by a program of its own. An entry is a row with one of its experts; *ranks* order
entries by their experts, each counting how many come before it, which for some thousands is sooner
done than any sort. Entries of one expert are cut into *tiles*. Nothing here asks the host: there
are as many tiles as any choice may need, and those that nobody needs are empty.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.experts import SMALLEST_WEIGHT, Routing
from pagefleet_kernels.triton_jit import jit, jit_once_for

_RANKED, _COMPARED = 32, 256
"""Entries of a program that ranks, and others that it looks at at once."""

_SMALLEST_WEIGHT = tl.constexpr(SMALLEST_WEIGHT)


@jit
def _in_open_groups(
    worths: tl.tensor,
    free: tl.tensor,
    numbers: tl.tensor,
    CHOICES: tl.constexpr,
    GROUPS: tl.constexpr,
    OPEN_GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    SIGMOID: tl.constexpr,
) -> tl.tensor:
    """Which experts a row may choose: those of the best groups."""
    groups = tl.arange(0, PLACES)
    own_groups = numbers // (CHOICES // GROUPS)
    best_worths = tl.full([PLACES], -float("inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        inside = free & (own_groups == group)
        best = tl.max(tl.where(inside, worths, -float("inf")), 0)
        worth = best
        if SIGMOID:
            number = tl.min(tl.where(inside & (worths == best), numbers, CHOICES), 0)
            others = inside & (numbers != number)
            worth += tl.max(tl.where(others, worths, -float("inf")), 0)
        best_worths = tl.where(groups == group, worth, best_worths)
    closed = groups < GROUPS
    allowed = numbers < 0
    for _ in tl.static_range(OPEN_GROUPS):
        best = tl.max(tl.where(closed, best_worths, -float("inf")), 0)
        number = tl.min(tl.where(closed & (best_worths == best), groups, PLACES), 0)
        closed = closed & (groups != number)
        allowed = allowed | (own_groups == number)
    return free & allowed


@jit
def _route_kernel(
    scores: tl.tensor,
    correction: tl.tensor,
    taken: tl.tensor,
    factors: tl.tensor,
    stride: tl.tensor,
    factor: tl.tensor,
    CHOICES: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    PLACES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    OPEN_GROUPS: tl.constexpr,
    GROUP_PLACES: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    numbers, places = tl.arange(0, SIZE), tl.arange(0, PLACES)
    free = numbers < CHOICES
    found = tl.load(scores + row * stride + numbers, mask=free, other=0.0).to(tl.float32)
    values = tl.where(free & (found == found), found, -float("inf"))
    if SIGMOID:
        powers = tl.sigmoid(values)
        values = powers
        if CORRECTED:
            values += tl.load(correction + numbers, mask=free, other=0.0)
    else:
        powers = tl.exp(values - tl.max(values, 0))
    sums = tl.sum(tl.where(free, powers, 0.0), 0)
    if GROUPS > 1:
        free = _in_open_groups(
            values, free, numbers, CHOICES, GROUPS, OPEN_GROUPS, GROUP_PLACES, SIGMOID
        )
    chosen, weights = tl.zeros([PLACES], tl.int32), tl.zeros([PLACES], tl.float32)
    for place in tl.static_range(CHOSEN):
        best = tl.max(tl.where(free, values, -float("inf")), 0)
        number = tl.min(tl.where(free & (values == best), numbers, SIZE), 0)
        chosen = tl.where(places == place, number, chosen)
        weight = tl.sum(tl.where(numbers == number, powers, 0.0), 0)
        weights = tl.where(places == place, weight, weights)
        free = free & (numbers != number)
    if RENORMALIZED:
        sums = tl.sum(weights, 0)
    if SIGMOID:
        sums = sums + _SMALLEST_WEIGHT if RENORMALIZED else 1.0
    weights = weights / sums * factor
    if SHARED:
        counting = 1.0
        if WEIGHTED:
            counting = tl.sigmoid(tl.load(scores + row * stride + CHOICES).to(tl.float32))
        chosen = tl.where(places >= CHOSEN, CHOICES + places - CHOSEN, chosen)
        weights = tl.where(places >= CHOSEN, counting, weights)
    inside = places < CHOSEN + SHARED
    begin = row * (CHOSEN + SHARED)
    tl.store(taken + begin + places, chosen, mask=inside)
    tl.store(factors + begin + places, weights, mask=inside)


@jit_once_for("count")
def _rank_kernel(
    taken: tl.tensor,
    order: tl.tensor,
    ordered: tl.tensor,
    count: tl.tensor,
    RANKED: tl.constexpr,
    COMPARED: tl.constexpr,
) -> None:
    """Writes entries to their places, equals in their order, and their experts beside them."""
    own = tl.program_id(0) * RANKED + tl.arange(0, RANKED)
    experts = tl.load(taken + own, mask=own < count, other=0)
    ranks = tl.zeros([RANKED], tl.int32)
    for begin in range(0, count, COMPARED):
        others = begin + tl.arange(0, COMPARED)
        theirs = tl.load(taken + others, mask=others < count, other=2147483647)[None, :]
        earlier = others[None, :] < own[:, None]
        before = (theirs < experts[:, None]) | ((theirs == experts[:, None]) & earlier)
        ranks += tl.sum(before.to(tl.int32), 1)
    tl.store(order + ranks, own, mask=own < count)
    tl.store(ordered + ranks, experts, mask=own < count)


@jit
def _entries_below(
    ordered: tl.tensor, numbers: tl.tensor, count: tl.tensor, halvings: tl.tensor
) -> tl.tensor:
    """How many entries have experts below each number: a binary search for all of them."""
    low = numbers * 0
    high = low + count
    for _ in range(halvings):
        middle = (low + high) // 2
        searched = low < high
        below = tl.load(ordered + middle, mask=searched, other=0) < numbers
        low = tl.where(searched & below, middle + 1, low)
        high = tl.where(searched & (below == 0), middle, high)
    return low


@jit_once_for("count", "halvings", "tile_count")
def _tile_kernel(
    ordered: tl.tensor,
    tiles: tl.tensor,
    count: tl.tensor,
    halvings: tl.tensor,
    tile_count: tl.tensor,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Writes int32 [tiles, 3]: a tile's expert, its first place, and how many it has, or 0."""
    numbers = tl.arange(0, SIZE)
    begins = _entries_below(ordered, numbers, count, halvings)
    sizes = _entries_below(ordered, numbers + 1, count, halvings) - begins
    counts = tl.cdiv(sizes, ROWS)
    ends = tl.cumsum(counts, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    experts = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    own = numbers[None, :] == experts[:, None]
    skipped = (tile[:, None] - (ends - counts)[None, :]) * ROWS
    first = tl.sum(tl.where(own, begins[None, :] + skipped, 0), 1)
    left = tl.sum(tl.where(own, sizes[None, :] - skipped, 0), 1)
    inside = tile < tile_count
    tl.store(tiles + tile * 3, experts, mask=inside)
    tl.store(tiles + tile * 3 + 1, first, mask=inside)
    tl.store(tiles + tile * 3 + 2, tl.minimum(left, ROWS), mask=inside)


def route(
    scores: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`reference.route`, but a row's experts are in the order in which it chose.

    Args:
        scores: [T, experts to choose from], and one more if it weighs shared experts.
        correction: float32 [experts to choose from].

    Returns:
        int32 [T, taken] and float32 [T, taken].
    """
    rows, choices = len(scores), scores.shape[1] - routing.other_scores
    taken = torch.empty(rows, routing.taken, dtype=torch.int32, device=scores.device)
    factors = torch.empty_like(taken, dtype=torch.float32)
    if rows:
        _route_kernel[(rows,)](
            scores,
            scores if correction is None else correction,
            taken,
            factors,
            scores.stride(0),
            routing.factor,
            CHOICES=choices,
            SIZE=triton.next_power_of_2(choices),
            CHOSEN=routing.chosen,
            SHARED=routing.shared,
            PLACES=triton.next_power_of_2(routing.taken),
            WEIGHTED=routing.weighted,
            SIGMOID=routing.sigmoid,
            CORRECTED=correction is not None,
            RENORMALIZED=routing.renormalized,
            GROUPS=routing.groups,
            OPEN_GROUPS=routing.open_groups,
            GROUP_PLACES=triton.next_power_of_2(routing.groups),
            num_warps=1,
        )
    return taken, factors


def sort_tiles(taken: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Entries by their experts, in tiles of up to so many `rows`.

    Args:
        taken: int32 [T, experts of each row], below `experts`.

    Returns:
        int32 [entries], which entry is at each place; int32 [tiles, 3], the expert of each tile,
        its first place, and how many it has, which is below 1 where there are more tiles than are
        needed.
    """
    count = taken.numel()
    order, ordered = (torch.empty_like(taken).flatten() for _ in range(2))
    tile_count = count // rows + min(count, experts)
    tiles = taken.new_empty(tile_count, 3)
    ranked = triton.cdiv(count, _RANKED)
    _rank_kernel[(ranked,)](taken, order, ordered, count, RANKED=_RANKED, COMPARED=_COMPARED)
    _tile_kernel[(triton.cdiv(tile_count, _RANKED),)](
        ordered,
        tiles,
        count,
        count.bit_length(),
        tile_count,
        SIZE=triton.next_power_of_2(experts),
        TILES=_RANKED,
        ROWS=rows,
    )
    return order, tiles
