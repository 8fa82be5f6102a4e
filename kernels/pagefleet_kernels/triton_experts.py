"""Mixtures of experts on GPUs, in Triton: `reference.experts` with plain weights.

What a row takes is decided on the device, and the host never waits for it: grids and buffers are
as large as any choice may need, so that a captured CUDA graph holds for every one. Each row is
routed by a program of its own. An entry is a row with one of its experts; *ranks* orders entries by
their experts, each counting how many come before it, which for some thousands is sooner done than
any sort. Entries of one expert are cut into *tiles*, which a product takes through the expert's
matrices, with gates and their values side by side; programs of tiles that nobody needs end at
once. At last a row's products are weighted and added up in the order in which it chose.

So a row's bits depend on the row, and on the tiles' sizes: with `invariant` there is one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.experts import Experts, Routing
from pagefleet_kernels.layers import Layer
from pagefleet_kernels.triton_activation import gate_values
from pagefleet_kernels.triton_jit import INTERPRETED, jit, jit_once_for
from pagefleet_kernels.triton_matmul import dot_type
from pagefleet_kernels.triton_tiling import Chip, chip_of

_FEW_ROWS, _ROWS = 16, 64
"""Of a tile: few where experts have fewer than that on average."""
_COLUMNS = 64
_DEPTH_BYTES = 128
_RANKED, _COMPARED = 32, 256
"""Entries of a program that ranks, and others that it looks at at once."""
_SUMMED = 1024


@jit
def _route_kernel(
    scores: tl.tensor,
    taken: tl.tensor,
    factors: tl.tensor,
    stride: tl.tensor,
    CHOICES: tl.constexpr,
    SIZE: tl.constexpr,
    CHOSEN: tl.constexpr,
    SHARED: tl.constexpr,
    PLACES: tl.constexpr,
    RENORMALIZED: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    numbers, places = tl.arange(0, SIZE), tl.arange(0, PLACES)
    free = numbers < CHOICES
    found = tl.load(scores + row * stride + numbers, mask=free, other=0.0).to(tl.float32)
    values = tl.where(free & (found == found), found, -float("inf"))
    largest = tl.max(values, 0)
    sums = tl.sum(tl.where(free, tl.exp(values - largest), 0.0), 0)
    chosen, powers = tl.zeros([PLACES], tl.int32), tl.zeros([PLACES], tl.float32)
    for place in tl.static_range(CHOSEN):
        best = tl.max(tl.where(free, values, -float("inf")), 0)
        number = tl.min(tl.where(free & (values == best), numbers, SIZE), 0)
        chosen = tl.where(places == place, number, chosen)
        powers = tl.where(places == place, tl.exp(best - largest), powers)
        free = free & (numbers != number)
    if RENORMALIZED:
        sums = tl.sum(powers, 0)
    weights = powers / sums
    if SHARED:
        opened = tl.load(scores + row * stride + CHOICES).to(tl.float32)
        chosen = tl.where(places >= CHOSEN, CHOICES + places - CHOSEN, chosen)
        weights = tl.where(places >= CHOSEN, tl.sigmoid(opened), weights)
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


@jit
def _expert_kernel(
    values: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    value_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EACH: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """One program per (tile, columns). With gates the rows of entries are read, of which each row
    has EACH, and places written; without, places are read and entries written.
    """
    expert = tl.load(tiles + tl.program_id(0) * 3).to(tl.int64)
    first = tl.load(tiles + tl.program_id(0) * 3 + 1)
    size = tl.load(tiles + tl.program_id(0) * 3 + 2)
    if size > 0:
        TYPE: tl.constexpr = output.dtype.element_ty
        lines = tl.arange(0, ROWS)
        known = lines < size
        entries = tl.load(order + first + lines, mask=known, other=0)
        places = first + lines
        rows = entries // EACH if GATED else places
        targets = places if GATED else entries
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        depths = tl.arange(0, DEPTH)
        left = values + rows.to(tl.int64)[:, None] * value_stride + depths[None, :]
        outputs = expert * (2 * OUTPUTS if GATED else OUTPUTS)
        right = weight + outputs * INPUTS + columns.to(tl.int64)[None, :] * INPUTS + depths[:, None]
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        others = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, INPUTS, DEPTH):
            inside = begin + depths < INPUTS
            row_mask = known[:, None] & inside[None, :]
            mask = (columns < OUTPUTS)[None, :] & inside[:, None]
            part = tl.load(left + begin, mask=row_mask, other=0.0).to(DOT_TYPE)
            weights = tl.load(right + begin, mask=mask, other=0.0).to(DOT_TYPE)
            sums = tl.dot(part, weights, sums, input_precision="ieee")
            if GATED:
                ups = tl.load(right + OUTPUTS * INPUTS + begin, mask=mask, other=0.0).to(DOT_TYPE)
                others = tl.dot(part, ups, others, input_precision="ieee")
        if BIASED:
            own = bias + outputs + columns
            sums += tl.load(own, mask=columns < OUTPUTS, other=0.0).to(tl.float32)[None, :]
            if GATED:
                own += OUTPUTS
                others += tl.load(own, mask=columns < OUTPUTS, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gates, ups = sums.to(TYPE).to(tl.float32), others.to(TYPE).to(tl.float32)
            sums = gate_values(gates, ups, TYPE, ACTIVATION)
        place = targets.to(tl.int64)[:, None] * OUTPUTS + columns[None, :]
        mask = known[:, None] & (columns < OUTPUTS)[None, :]
        tl.store(output + place, sums.to(TYPE), mask=mask)


@jit
def _weigh_kernel(
    products: tl.tensor,
    factors: tl.tensor,
    output: tl.tensor,
    SIZE: tl.constexpr,
    EACH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program per (row, columns): the sum of its weighted products."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < SIZE
    sums = tl.zeros([COLUMNS], tl.float32)
    for place in range(EACH):
        entry = row * EACH + place
        product = tl.load(products + entry * SIZE + columns, mask=inside, other=0.0)
        sums += tl.load(factors + entry) * product.to(tl.float32)
    tl.store(output + row * SIZE + columns, sums.to(output.dtype.element_ty), mask=inside)


def route(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """`reference.route`, but a row's experts are in the order in which it chose.

    Args:
        scores: [T, experts to choose from], and one more if there are shared experts.

    Returns:
        int32 [T, taken] and float32 [T, taken].
    """
    rows, choices = len(scores), scores.shape[1] - (routing.shared > 0)
    taken = torch.empty(rows, routing.taken, dtype=torch.int32, device=scores.device)
    factors = torch.empty_like(taken, dtype=torch.float32)
    if rows:
        _route_kernel[(rows,)](
            scores,
            taken,
            factors,
            scores.stride(0),
            CHOICES=choices,
            SIZE=triton.next_power_of_2(choices),
            CHOSEN=routing.chosen,
            SHARED=routing.shared,
            PLACES=triton.next_power_of_2(routing.taken),
            RENORMALIZED=routing.renormalized,
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


def expert_sums(
    values: Tensor,
    taken: Tensor,
    factors: Tensor,
    experts: Experts,
    *,
    invariant: bool = False,
    chip: Chip | None = None,
) -> Tensor:
    """What experts make of the rows that take them, weighted and added up.

    Args:
        values: [T, size], rows contiguous.
        taken: int32 [T, experts of each row].
        factors: float32, the same.
        experts: with plain matrices of the type of `values`.
        invariant: whether a row has the same bits whatever rows stand beside it.
        chip: what to launch for, instead of the chip of `values`.

    Returns:
        [T, size] in the type of `values`.
    """
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, Tensor)
    assert isinstance(down, Tensor)
    (rows, size), each = values.shape, taken.shape[1]
    output = values.new_empty(rows, size)
    if not rows:
        return output
    few = not invariant and rows * each < _FEW_ROWS * experts.count
    height = _FEW_ROWS if few else _ROWS
    order, tiles = sort_tiles(taken, experts.count, height)
    chip = chip or chip_of(values.device)
    inner = values.new_empty(rows * each, down.shape[1])
    products = values.new_empty(rows * each, size)

    def multiply(
        left: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, gated: bool
    ) -> None:
        _expert_kernel[(len(tiles), triton.cdiv(target.shape[1], _COLUMNS))](
            left,
            weight,
            weight if bias is None else bias,
            target,
            order,
            tiles,
            left.stride(0),
            INPUTS=left.shape[1],
            OUTPUTS=target.shape[1],
            EACH=each,
            GATED=gated,
            ACTIVATION=experts.activation.value,
            BIASED=bias is not None,
            ROWS=height,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH_BYTES // values.element_size(),
            DOT_TYPE=dot_type(values.dtype),
            num_warps=4,
            num_stages=min(3, chip.stages),
            enable_fp_fusion=False,
        )

    multiply(values, gate_up, experts.gate_up_bias, inner, gated=True)
    multiply(inner, down, experts.down_bias, products, gated=False)
    _weigh_kernel[(rows, triton.cdiv(size, _SUMMED))](
        products, factors, output, SIZE=size, EACH=each, COLUMNS=_SUMMED
    )
    return output


class TritonExperts:
    """`reference.experts`, with a router that is a layer of its own."""

    def __init__(self, experts: Experts, router: Layer, *, invariant: bool) -> None:
        self._experts, self._router, self._invariant = experts, router, invariant
        self._ready = INTERPRETED

    def __call__(self, values: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, size] -> [T, size]; no adapter changes it. The first call compiles for other numbers
        of rows too, so that no later one waits for that.
        """
        if not self._ready:
            self._ready = True
            for rows in (1, _FEW_ROWS * self._experts.count):
                self(values.new_zeros(rows, values.shape[1]))
        taken, factors = route(self._router(values), self._experts.routing)
        return expert_sums(values, taken, factors, self._experts, invariant=self._invariant)
