"""Mixtures of experts on GPUs, in Triton: `reference.experts`, with matrices that are plain or of
few bits, which are widened as they are read (`triton_packed`); inputs stay as they are.

What a row takes is decided on the device (`triton_routing`), and the host never waits for it: grids
and buffers are as large as any choice may need, so that a captured CUDA graph holds for every one.
A product takes each tile of entries through the matrices of its expert, with gates and their values
side by side; programs of tiles that nobody needs end at once. At last a row's products are weighted
and added up in the order in which it chose.

So a row's bits depend on the row, and on the tiles' sizes: with `invariant` there is one.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.experts import Experts
from pagefleet_kernels.layers import Activation, Layer
from pagefleet_kernels.quantized import Quantized
from pagefleet_kernels.triton_activation import gate_values
from pagefleet_kernels.triton_jit import INTERPRETED, jit
from pagefleet_kernels.triton_matmul import dot_type
from pagefleet_kernels.triton_packed import BLOCK, PackedMatrix, load_block, widened
from pagefleet_kernels.triton_routing import route, sort_tiles
from pagefleet_kernels.triton_tiling import Chip, chip_of

_FEW_ROWS, _ROWS = 16, 64
"""Of a tile: few where experts have fewer than that on average."""
_DEPTH_BYTES = 128
"""Of a plain matrix, that are multiplied at once."""
_SUMMED = 1024
_PLAIN = tl.constexpr(-1)
"""In the place of a kind of numbers."""


@jit
def _load(
    weights: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    lines: tl.tensor,
    known: tl.tensor,
    block: tl.tensor,
    INPUTS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What lines of a matrix of LINES hold of a block, for `_part`."""
    if KIND == _PLAIN:
        depths = block * BLOCK + tl.arange(0, BLOCK)
        mask = known[:, None] & (depths < INPUTS)[None, :]
        held = tl.load(weights + lines[:, None] * INPUTS + depths[None, :], mask=mask, other=0.0)
        scale, minimum = held, held
    else:
        packed = block * LINES + lines
        held, scale, minimum = load_block(weights, scales, minimums, packed, known, KIND)
    return held, scale, minimum


@jit
def _part(
    held: tl.tensor,
    scale: tl.tensor,
    minimum: tl.tensor,
    PART: tl.constexpr,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
    NATIVE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
) -> tl.tensor:
    """The weights of a part of what `_load` gave, of type TYPE, to be multiplied."""
    weights = held if KIND == _PLAIN else widened(held, scale, minimum, PART, KIND, TYPE, NATIVE)
    return weights.to(DOT_TYPE)


@jit
def _expert_kernel(
    values: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    minimums: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    value_stride: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    LINES: tl.constexpr,
    EACH: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    KIND: tl.constexpr,
    NATIVE: tl.constexpr,
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
        DEPTH: tl.constexpr = BLOCK // PARTS
        known = tl.arange(0, ROWS) < size
        places = first + tl.arange(0, ROWS)
        entries = tl.load(order + places, mask=known, other=0)
        rows = entries // EACH if GATED else places
        targets = places if GATED else entries
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < OUTPUTS
        lines = expert * (2 * OUTPUTS if GATED else OUTPUTS) + columns
        right = values + rows.to(tl.int64)[None, :] * value_stride
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        others = tl.zeros([COLUMNS, ROWS], tl.float32)
        for block in range(tl.cdiv(INPUTS, BLOCK)):
            gates, scale, minimum = _load(
                weights, scales, minimums, lines, inside, block, INPUTS, LINES, BLOCK, KIND
            )
            if GATED:
                ups, up_scale, up_minimum = _load(
                    weights, scales, minimums, lines + OUTPUTS, inside, block, INPUTS, LINES,
                    BLOCK, KIND,
                )  # fmt: skip
            for part in tl.static_range(PARTS):
                depths = block * BLOCK + part * DEPTH + tl.arange(0, DEPTH)[:, None]
                mask = known[None, :] & (depths < INPUTS)
                taken = tl.load(right + depths, mask=mask, other=0.0).to(DOT_TYPE)
                left = _part(gates, scale, minimum, part, KIND, TYPE, NATIVE, DOT_TYPE)
                sums = tl.dot(left, taken, sums, input_precision="ieee")
                if GATED:
                    left = _part(ups, up_scale, up_minimum, part, KIND, TYPE, NATIVE, DOT_TYPE)
                    others = tl.dot(left, taken, others, input_precision="ieee")
        if BIASED:
            sums += tl.load(bias + lines, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if BIASED:
                own = bias + lines + OUTPUTS
                others += tl.load(own, mask=inside, other=0.0).to(tl.float32)[:, None]
            gated, multiplied = sums.to(TYPE).to(tl.float32), others.to(TYPE).to(tl.float32)
            sums = gate_values(gated, multiplied, TYPE, ACTIVATION)
        place = targets.to(tl.int64)[None, :] * OUTPUTS + columns[:, None]
        tl.store(output + place, sums.to(TYPE), mask=known[None, :] & inside[:, None])


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


@dataclass(frozen=True)
class PackedExperts:
    """`Experts` without their router, whose quantized matrices are packed."""

    gate_up: Tensor | PackedMatrix
    down: Tensor | PackedMatrix
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation
    count: int

    @classmethod
    def of(cls, experts: Experts) -> Self:
        """Pack those that are not."""
        gate_up, down = (
            PackedMatrix.of(each) if isinstance(each, Quantized) else each
            for each in (experts.gate_up, experts.down)
        )
        biases = experts.gate_up_bias, experts.down_bias
        return cls(gate_up, down, *biases, experts.activation, experts.count)

    @property
    def inner_size(self) -> int:
        """Gates of an expert."""
        return self.down.shape[1] if isinstance(self.down, Tensor) else self.down.inputs


def expert_sums(
    values: Tensor,
    taken: Tensor,
    factors: Tensor,
    experts: PackedExperts,
    *,
    invariant: bool = False,
    chip: Chip | None = None,
) -> Tensor:
    """What experts make of the rows that take them, weighted and added up.

    Args:
        values: [T, size], rows contiguous.
        taken: int32 [T, experts of each row].
        factors: float32, the same.
        experts: plain matrices are of the type of `values`, to which others are widened.
        invariant: whether a row has the same bits whatever rows stand beside it.
        chip: what to launch for, instead of the chip of `values`.

    Returns:
        [T, size] in the type of `values`.
    """
    (rows, size), each = values.shape, taken.shape[1]
    output = values.new_empty(rows, size)
    if not rows:
        return output
    exact = values.dtype is torch.float32  # which no matrix unit computes: larger tiles spill
    few = not invariant and rows * each < _FEW_ROWS * experts.count
    height, columns = (_FEW_ROWS, 32) if exact else (_FEW_ROWS if few else _ROWS, 64)
    order, tiles = sort_tiles(taken, experts.count, height)
    chip = chip or chip_of(values.device)
    inner = values.new_empty(rows * each, experts.inner_size)
    products = values.new_empty(rows * each, size)

    def multiply(
        left: Tensor,
        matrix: Tensor | PackedMatrix,
        bias: Tensor | None,
        target: Tensor,
        *,
        gated: bool,
    ) -> None:
        if isinstance(matrix, Tensor):
            weights, scales, minimums = matrix, matrix, None
            block, parts, kind = _DEPTH_BYTES // matrix.element_size(), 1, _PLAIN.value
            threads = 128
        else:
            weights, scales, minimums = matrix.numbers, matrix.scales, matrix.minimums
            block, parts, kind = BLOCK, 2, matrix.kind.value
            threads = 128 if few or chip.warpgroup_matrices else 256  # registers hold all there
        _expert_kernel[(len(tiles), triton.cdiv(target.shape[1], columns))](
            left,
            weights,
            scales,
            scales if minimums is None else minimums,
            left if bias is None else bias,
            target,
            order,
            tiles,
            left.stride(0),
            INPUTS=left.shape[1],
            OUTPUTS=target.shape[1],
            LINES=experts.count * target.shape[1] * (2 if gated else 1),
            EACH=each,
            GATED=gated,
            ACTIVATION=experts.activation.value,
            BIASED=bias is not None,
            ROWS=height,
            COLUMNS=columns,
            BLOCK=block,
            PARTS=parts,
            KIND=kind,
            NATIVE=chip.converts_fp8,
            DOT_TYPE=dot_type(values.dtype),
            num_warps=8 if exact else max(4, threads // chip.lanes),
            num_stages=min(3, chip.stages),
            enable_fp_fusion=False,
        )

    multiply(values, experts.gate_up, experts.gate_up_bias, inner, gated=True)
    multiply(inner, experts.down, experts.down_bias, products, gated=False)
    _weigh_kernel[(rows, triton.cdiv(size, _SUMMED))](
        products, factors, output, SIZE=size, EACH=each, COLUMNS=_SUMMED
    )
    return output


class TritonExperts:
    """`reference.experts`, with a router that is a layer of its own."""

    def __init__(self, experts: Experts, router: Layer, *, invariant: bool) -> None:
        self._experts, self._routing = PackedExperts.of(experts), experts.routing
        self._correction = experts.correction
        self._router, self._invariant = router, invariant
        self._ready = INTERPRETED

    def __call__(self, values: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, size] -> [T, size]; no adapter changes it. The first call compiles for other numbers
        of rows too, so that no later one waits for that.
        """
        if not self._ready:
            self._ready = True
            for rows in (1, _FEW_ROWS * self._experts.count):
                self(values.new_zeros(rows, values.shape[1]))
        taken, factors = route(self._router(values), self._routing, self._correction)
        return expert_sums(values, taken, factors, self._experts, invariant=self._invariant)
