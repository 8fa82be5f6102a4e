"""Chooses tokens from logits on GPUs, in Triton, without a sort and without the host.

A draw is cut by temperature, top-k, top-p (Holtzman et al., "The curious case of neural text
degeneration", 2020) and min-p (Nguyen et al., "Turning up the heat", 2024), in this order, then
made by inverse transform through the tokens in the order of their ids, with 24 bits of
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Both cuts ask for a threshold: the largest logit such that the tokens from it upwards are k in
number, or p in probability. It is found as a radix search finds it: floats, as integers of the
same order, are fixed three bits at a time, each by one pass that sums the tokens by those bits.

Eleven passes over a vocabulary would cost more than a sort, so the row is narrowed first. A program
reads it in tiles, and knows the best token of each lane. Where these alone reach k or p, the row
does so no lower: what lies below their threshold is cut. What is left, hardly more than the tokens
that stay, is copied to memory of the program's own, and takes the row's place. Only where it is
more than a tile the passes go over the whole row.

Probabilities are integers, in units of 2 ** -30. Their sums depend on no order, so a draw has the
same bits in every batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.triton_jit import jit, jit_once_for

_TILE = 2048
"""Tokens that are told apart by the digits of their keys at once."""

_WIDE = 4096
"""Tokens that are read at once: so many loads are under way."""

_GREEDY = tl.constexpr(1e-5)
_WEIGHT_ONE = tl.constexpr(2.0**30)
_DIGIT_BITS = tl.constexpr(3)
_DIGITS = tl.constexpr(11)


@jit
def _load_scaled(
    logits: tl.tensor, begin: tl.tensor, vocabulary: tl.tensor, heat: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """A tile of logits over the temperature, -inf past the end; and the tile's ids."""
    ids = begin + tl.arange(0, TILE)
    values = tl.load(logits + ids, mask=ids < vocabulary, other=float("-inf"))
    return tl.div_rn(values, heat) + 0.0, ids


@jit
def _keys_of(scaled: tl.tensor) -> tl.tensor:
    """Unsigned integers in the order of the floats."""
    bits = scaled.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@jit
def _weights_of(scaled: tl.tensor, top: tl.tensor, unit: tl.tensor) -> tl.tensor:
    return (tl.exp(scaled - top) * unit + 0.5).to(tl.int32)


@jit
def _threshold(
    row: tl.tensor,
    length: tl.tensor,
    heat: tl.tensor,
    top: tl.tensor,
    unit: tl.tensor,
    floor: tl.tensor,
    goal: tl.tensor,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(t, sum above t): the largest key t with which the tokens of keys from t upwards reach
    `goal`, in weight or else in number. Tokens of keys under `floor` do not count.
    """
    BINS: tl.constexpr = 2**_DIGIT_BITS
    bins = tl.arange(0, BINS)
    threshold = (goal * 0).to(tl.uint32)
    above = goal * 0
    for level in range(_DIGITS):
        shift = (_DIGITS - 1 - level) * _DIGIT_BITS
        sums = tl.zeros([BINS], tl.int32)
        for begin in range(0, length, TILE):
            scaled, ids = _load_scaled(row, begin, length, heat, TILE)
            keys = _keys_of(scaled)
            amounts = (ids < length).to(tl.int32)
            if WEIGHTED:
                amounts = _weights_of(scaled, top, unit)
            amounts = tl.where(keys >= floor, amounts, 0)
            digits = (keys >> shift).to(tl.int32, bitcast=True) - (threshold << _DIGIT_BITS).to(
                tl.int32, bitcast=True
            )
            sums += tl.sum(tl.where(digits[:, None] == bins[None, :], amounts[:, None], 0), 0)
        from_here = tl.sum(tl.where(bins[:, None] >= bins[None, :], sums[:, None], 0), 0)
        digit = tl.sum((above + from_here >= goal).to(tl.int32)) - 1
        above += tl.sum(tl.where(bins > digit, sums, 0))
        threshold = (threshold << _DIGIT_BITS) + digit.to(tl.uint32)
    return threshold, above


@jit
def _weight_from(
    row: tl.tensor,
    length: tl.tensor,
    heat: tl.tensor,
    top: tl.tensor,
    unit: tl.tensor,
    floor: tl.tensor,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """The weight of all tokens of keys from `floor` upwards."""
    sums = tl.zeros([WIDE], tl.int32)
    for begin in range(0, length, WIDE):
        scaled, _ = _load_scaled(row, begin, length, heat, WIDE)
        sums += tl.where(_keys_of(scaled) >= floor, _weights_of(scaled, top, unit), 0)
    return tl.sum(sums)


@jit
def _narrow(
    row: tl.tensor,
    length: tl.tensor,
    heat: tl.tensor,
    top: tl.tensor,
    unit: tl.tensor,
    goal: tl.tensor,
    values: tl.tensor,
    value_ids: tl.tensor,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Copy scaled logits that decide `_threshold` to `values`, in the order of ids, their ids to
    `value_ids`, and tell how many they are; 0 if they are more than TILE.

    Behind the first TILE of `values` are the largest of each lane.
    """
    lanes, count = values + TILE, goal * 0
    none = (goal * 0).to(tl.uint32)
    reached = _weight_from(lanes, WIDE, 1.0, top, unit, none, WIDE) if WEIGHTED else WIDE
    if reached >= goal:
        bound, _ = _threshold(lanes, WIDE, 1.0, top, unit, none, goal, WEIGHTED, TILE)
        for begin in range(0, length, WIDE):
            scaled, ids = _load_scaled(row, begin, length, heat, WIDE)
            stays = (_keys_of(scaled) >= bound) & (ids < length)
            places = count + tl.cumsum(stays.to(tl.int32), 0) - 1
            fits = stays & (places < TILE)
            tl.store(values + places, scaled, mask=fits)
            tl.store(value_ids + places, ids, mask=fits)
            count += tl.sum(stays.to(tl.int32))
        tl.debug_barrier()
    return tl.where(count > TILE, 0, count)


@jit
def _survivors(
    row: tl.tensor,
    begin: tl.tensor,
    length: tl.tensor,
    heat: tl.tensor,
    top: tl.tensor,
    unit: tl.tensor,
    floor: tl.tensor,
    ties: tl.tensor,
    ties_kept: tl.tensor,
    least: tl.tensor,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A tile's weights, 0 for what is cut; and how many tokens up to its end equal the threshold.

    Of the tokens that do, the first `ties_kept` stay, all if they may be as many as the row.
    """
    scaled, ids = _load_scaled(row, begin, length, heat, TILE)
    keys = _keys_of(scaled)
    weights = _weights_of(scaled, top, unit)
    kept = keys >= floor
    if ties_kept < length:
        equal = ((keys == floor) & (ids < length)).to(tl.int32)
        kept &= (keys > floor) | (ties + tl.cumsum(equal, 0) - equal < ties_kept)
        ties += tl.sum(equal)
    kept &= weights.to(tl.float32) >= least
    return tl.where(kept, weights, 0), ties


@jit
def _best_of(
    logits: tl.tensor,
    vocabulary: tl.tensor,
    heat: tl.tensor,
    greedy: tl.tensor,
    WIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(largest scaled logit, the lowest id of the largest logit, softmax's denominator unless
    `greedy`, the largest scaled logit of each lane of the tiles).

    The id is -1 if a logit is NaN or the largest is not finite.
    """
    tops = tl.full([WIDE], float("-inf"), tl.float32)
    owners = tl.zeros([WIDE], tl.int32)
    for begin in range(0, vocabulary, WIDE):
        ids = begin + tl.arange(0, WIDE)
        values = tl.load(logits + ids, mask=ids < vocabulary, other=float("-inf"))
        values = tl.where(values == values, values, float("inf"))
        owners = tl.where(values > tops, ids, owners)
        tops = tl.where(values > tops, values, tops)
    highest = tl.max(tops, 0)
    best = tl.min(tl.where(tops == highest, owners, vocabulary), 0)
    top = tl.div_rn(highest, heat) + 0.0
    usable = tl.abs(top) < float("inf")
    masses = tl.zeros([WIDE], tl.float32)
    if usable & ~greedy:
        for begin in range(0, vocabulary, WIDE):
            scaled, _ = _load_scaled(logits, begin, vocabulary, heat, WIDE)
            masses += tl.exp(scaled - top)
    return top, tl.where(usable, best, -1), tl.sum(masses), tl.div_rn(tops, heat) + 0.0


@jit_once_for("rows", "temperatures", "top_k", "top_p", "min_p", "seeds", "choices", "positions")
def _sample_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    values: tl.tensor,
    value_ids: tl.tensor,
    row_stride: tl.tensor,
    vocabulary: tl.tensor,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One program per draw, each with TILE + WIDE of `values` and TILE of `value_ids`."""
    draw = tl.program_id(0)
    row = logits + tl.load(rows + draw).to(tl.int64) * row_stride
    temperature = tl.load(temperatures + draw)
    greedy = temperature < _GREEDY
    heat = tl.where(greedy, 1.0, temperature)
    top, token, mass, tops = _best_of(row, vocabulary, heat, greedy, WIDE)
    if (token >= 0) & ~greedy:
        unit = _WEIGHT_ONE / mass
        values += draw.to(tl.int64) * (TILE + WIDE)
        value_ids += draw.to(tl.int64) * TILE
        tl.store(values + TILE + tl.arange(0, WIDE), tops)
        tl.debug_barrier()
        floor = tl.zeros([], tl.uint32)
        none = tl.zeros([], tl.int32)
        length, narrowed = none + vocabulary, none
        k = tl.load(top_k + draw)
        p = tl.load(top_p + draw)
        if k > 0:
            goal = tl.minimum(k, vocabulary)
            narrowed = _narrow(
                row, length, heat, top, unit, goal, values, value_ids, WEIGHTED=False,
                TILE=TILE, WIDE=WIDE,
            )  # fmt: skip
            if narrowed > 0:
                row, length, heat = values, narrowed, heat * 0 + 1
            floor, _ = _threshold(
                row, length, heat, top, unit, floor, goal, WEIGHTED=False, TILE=TILE
            )
        ties_kept = none + vocabulary
        if p < 1:
            total = _weight_from(row, length, heat, top, unit, floor, WIDE)
            goal = tl.maximum(tl.ceil(p * total.to(tl.float64)).to(tl.int32), 1)
            if k <= 0:
                narrowed = _narrow(
                    row, length, heat, top, unit, goal, values, value_ids, WEIGHTED=True,
                    TILE=TILE, WIDE=WIDE,
                )  # fmt: skip
                if narrowed > 0:
                    row, length, heat = values, narrowed, heat * 0 + 1
            floor, above = _threshold(
                row, length, heat, top, unit, floor, goal, WEIGHTED=True, TILE=TILE
            )
            edge = floor ^ 0x80000000
            edge = edge ^ ((edge.to(tl.int32, bitcast=True) >> 31) & 0x7FFFFFFF).to(tl.uint32)
            tied = _weights_of(edge.to(tl.float32, bitcast=True), top, unit)
            ties_kept = tl.cdiv(goal - above, tl.maximum(tied, 1))
        least = tl.load(min_p + draw) * _weights_of(top, top, unit).to(tl.float32)
        ties = none
        total = none
        for begin in range(0, length, WIDE):
            weights, ties = _survivors(
                row, begin, length, heat, top, unit, floor, ties, ties_kept, least, WIDE
            )
            total += tl.sum(weights)
        seed, choice = tl.load(seeds + draw), tl.load(choices + draw)
        word, _, _, _ = tl.philox(seed, tl.load(positions + draw), choice, none, none)
        target = ((word >> 8).to(tl.int64) * total >> 24).to(tl.int32)
        token, ties, before = none, none, none
        for begin in range(0, length, WIDE):
            weights, ties = _survivors(
                row, begin, length, heat, top, unit, floor, ties, ties_kept, least, WIDE
            )
            after = before + tl.sum(weights)
            if (before <= target) & (target < after):
                passed = before + tl.cumsum(weights, 0) <= target
                token = begin + tl.sum(passed.to(tl.int32))
            before = after
        if narrowed > 0:
            token = tl.load(value_ids + token)
    tl.store(tokens + draw, token.to(tl.int64))


def sample(
    logits: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    positions: Tensor,
) -> Tensor:
    """The token of each draw.

    Args:
        logits: float32 [L, V].
        rows: integers [n], the row of the logits that a draw reads; several may read one.
        temperatures: float32 [n]; below 1e-5 the most likely token is taken, the lowest id of
            equal ones.
        top_k: int32 [n]; whatever equals the k-th stays; 0 is off.
        top_p: float64 [n]; of tokens that are equally likely the lowest ids stay; 1 is off.
        min_p: float32 [n], the least share of the best token's probability; 0 is off.
        seeds: int64 [n], the key of the generator.
        choices: int32 [n], the second word of its counter.
        positions: int32 [n], the first word.

    Returns:
        int64 [n]; -1 where the row holds NaN or its largest logit is not finite.
    """
    tokens = seeds.new_empty(len(rows))
    tile, wide = (min(most, triton.next_power_of_2(logits.shape[1])) for most in (_TILE, _WIDE))
    if len(rows):
        _sample_kernel[(len(rows),)](
            logits,
            rows,
            temperatures,
            top_k,
            top_p,
            min_p,
            seeds,
            choices,
            positions,
            tokens,
            logits.new_empty(len(rows), tile + wide),
            rows.new_empty((len(rows), tile), dtype=torch.int32),
            logits.stride(0),
            logits.shape[1],
            TILE=tile,
            WIDE=wide,
            num_warps=16,
            enable_fp_fusion=False,
        )
    return tokens
