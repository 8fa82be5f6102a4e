"""Low-rank adapters on GPUs, in Triton: what `lora` means, beside any product.

Two kernels add to a product's outputs. One shrinks the rows that have an adapter, inner = A x, in
splits of the inputs whose sums the other adds up, scales and rounds to the numbers' type, before it
multiplies with B (`reference.lora`). Both take tiles of so few rows that neighbours often have one
adapter, and go through the adapters between the least and the largest number in their tile, so
that grids depend on shapes alone and a CUDA graph serves every mixture.

Ranks are padded to tiles of RANKS by zeros, each part (queries, keys, values; gates and values) of
each adapter by itself. All sizes are the layer's own: a row's bits depend on its adapter, and on
nothing beside it.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.layers import Layer
from pagefleet_kernels.lora import Factors, Loras
from pagefleet_kernels.triton_jit import jit_once_for
from pagefleet_kernels.triton_matmul import dot_type

_ROWS = 16
_RANKS = 16
_COLUMNS = 64
_DEPTH_BYTES = 128
_SPLIT = 1024
"""Inputs whose products one program adds up."""


@jit_once_for("rows")
def _shrink_kernel(
    values: tl.tensor,
    adapters: tl.tensor,
    down: tl.tensor,
    tiles: tl.tensor,
    inner: tl.tensor,
    rows: tl.tensor,
    value_stride: tl.tensor,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """One program per (tile of rows, tile of ranks, split); `inner` is [splits, rows, WIDTH]."""
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    number, split = tl.program_id(1), tl.program_id(2)
    own = tl.load(adapters + lines, mask=lines < rows, other=0)
    depths, ranks = tl.arange(0, DEPTH), tl.arange(0, RANKS)
    left = values + lines.to(tl.int64)[:, None] * value_stride + depths[None, :]
    places = (split * rows + lines).to(tl.int64)[:, None] * WIDTH + number * RANKS + ranks[None, :]
    least = tl.min(tl.where(own > 0, own, 2147483647), 0)
    for adapter in range(least, tl.max(own, 0) + 1):
        mine = own == adapter
        first, count = tl.load(tiles + adapter * 2), tl.load(tiles + adapter * 2 + 1)
        if (number < count) & (tl.max(mine.to(tl.int32), 0) > 0):
            lowest = (first + number) * RANKS + ranks
            right = down + lowest.to(tl.int64)[None, :] * INPUTS + depths[:, None]
            sums = tl.zeros([ROWS, RANKS], tl.float32)
            for step in range(0, SPLIT, DEPTH):
                begin = split * SPLIT + step
                inside = begin + depths < INPUTS
                mask = mine[:, None] & inside[None, :]
                part = tl.load(left + begin, mask=mask, other=0.0).to(DOT_TYPE)
                weights = tl.load(right + begin, mask=inside[:, None], other=0.0).to(DOT_TYPE)
                sums = tl.dot(part, weights, sums, input_precision="ieee")
            tl.store(inner + places, sums, mask=mine[:, None])


@jit_once_for("rows")
def _expand_kernel(
    output: tl.tensor,
    adapters: tl.tensor,
    inner: tl.tensor,
    scales: tl.tensor,
    up: tl.tensor,
    tiles: tl.tensor,
    spans: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    output_stride: tl.tensor,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> None:
    """One program per (tile of rows, tile of columns)."""
    TYPE: tl.constexpr = output.dtype.element_ty
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(adapters + lines, mask=lines < rows, other=0)
    tile = columns + tl.program_id(1) * 3
    part, outputs = tl.load(tile), tl.load(tile + 1) + tl.arange(0, COLUMNS)
    inside, ranks = outputs < tl.load(tile + 2), tl.arange(0, RANKS)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    least = tl.min(tl.where(own > 0, own, 2147483647), 0)
    for adapter in range(least, tl.max(own, 0) + 1):
        mine = own == adapter
        span = spans + (adapter * PARTS + part) * 3
        begin, count = tl.load(span).to(tl.int32), tl.load(span + 1).to(tl.int32)
        if (count > 0) & (tl.max(mine.to(tl.int32), 0) > 0):
            right = up + tl.load(span + 2) + outputs.to(tl.int64)[None, :] * (count * RANKS)
            product = tl.zeros([ROWS, COLUMNS], tl.float32)
            for number in range(count):
                places = lines.to(tl.int64)[:, None] * WIDTH + (begin + number) * RANKS
                places += ranks[None, :]
                total = tl.zeros([ROWS, RANKS], tl.float32)
                for _ in range(SPLITS):
                    total += tl.load(inner + places, mask=mine[:, None], other=0.0)
                    places += rows.to(tl.int64) * WIDTH
                scale = tl.load(scales + tl.load(tiles + adapter * 2) + begin + number)
                narrow = (total * scale).to(TYPE).to(DOT_TYPE)
                factors = right + number * RANKS + ranks[:, None]
                weights = tl.load(factors, mask=inside[None, :], other=0.0).to(DOT_TYPE)
                product = tl.dot(narrow, weights, product, input_precision="ieee")
            sums = tl.where(mine[:, None], product, sums)
    targets = output + lines.to(tl.int64)[:, None] * output_stride + outputs[None, :]
    mask = (own > 0)[:, None] & inside[None, :]
    before = tl.load(targets, mask=mask, other=0.0).to(tl.float32)
    tl.store(targets, (before + sums).to(TYPE), mask=mask)


class HeldLoras:
    """What the adapters of a model change in one layer, of which one does at least, on a device.

    A tile of ranks is RANKS rows of A of one part of one adapter.
    """

    def __init__(self, loras: Loras) -> None:
        example = next(factors[0].down for factors in loras if factors)
        device, self._inputs = example.device, example.shape[1]
        parts = sorted({(each.first, len(each.up)) for factors in loras for each in factors})
        self._parts = len(parts)
        downs, ups = [], []
        scales: list[float] = []
        tiles, spans = [(0, 0)], [(0, 0, 0)] * len(parts)
        place = 0
        for factors in loras:
            own = {(each.first, len(each.up)): each for each in factors}
            tiles.append((len(scales), sum(_tiles(each) for each in factors)))
            begin = 0
            for first, outputs in parts:
                each = own.get((first, outputs))
                count = 0 if each is None else _tiles(each)
                spans.append((begin, count, place - first * count * _RANKS))
                if each is not None:
                    added = count * _RANKS - each.rank
                    downs.append(F.pad(each.down, (0, 0, 0, added)))
                    ups.append(F.pad(each.up, (0, added)).flatten())
                    scales += [each.scale] * count
                    begin, place = begin + count, place + len(ups[-1])
        self._down, self._up = torch.cat(downs), torch.cat(ups)
        self._scales = torch.tensor(scales, device=device)
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self._spans = torch.tensor(spans, dtype=torch.int64, device=device)
        columns = [
            (part, begin, first + outputs)
            for part, (first, outputs) in enumerate(parts)
            for begin in range(first, first + outputs, _COLUMNS)
        ]
        self._columns = torch.tensor(columns, dtype=torch.int32, device=device)
        self._most = max(count for _, count in tiles)

    def add(self, output: Tensor, values: Tensor, adapters: Tensor) -> None:
        """Add what the rows' adapters make of them, in place; see `reference.lora`.

        Args:
            output: [T, outputs], rows contiguous.
            values: [T, inputs], rows contiguous, of the factors' type.
            adapters: int32 [T].
        """
        rows, splits = len(values), triton.cdiv(self._inputs, _SPLIT)
        inner = values.new_empty(splits, rows, self._most * _RANKS, dtype=torch.float32)
        row_tiles = triton.cdiv(rows, _ROWS)
        sizes = {"WIDTH": inner.shape[2], "ROWS": _ROWS, "RANKS": _RANKS}
        sizes["DOT_TYPE"] = dot_type(values.dtype)
        if not rows:
            return
        _shrink_kernel[(row_tiles, self._most, splits)](
            values,
            adapters,
            self._down,
            self._tiles,
            inner,
            rows,
            values.stride(0),
            INPUTS=self._inputs,
            SPLIT=_SPLIT,
            DEPTH=_DEPTH_BYTES // values.element_size(),
            enable_fp_fusion=False,
            **sizes,
        )
        _expand_kernel[(row_tiles, len(self._columns))](
            output,
            adapters,
            inner,
            self._scales,
            self._up,
            self._tiles,
            self._spans,
            self._columns,
            rows,
            output.stride(0),
            PARTS=self._parts,
            SPLITS=splits,
            COLUMNS=_COLUMNS,
            enable_fp_fusion=False,
            **sizes,
        )


def _tiles(factors: Factors) -> int:
    return -(-factors.rank // _RANKS)


def adapted(plain: Layer, loras: Loras) -> Layer:
    """A layer, and what its adapters add; behind a product that is rounded already."""
    held = HeldLoras(loras)

    def layer(values: Tensor, adapters: Tensor | None = None) -> Tensor:
        output = plain(values)
        if adapters is not None:
            held.add(output, values, adapters)
        return output

    return layer
