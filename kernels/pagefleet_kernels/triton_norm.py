"""Root mean square layer normalization (Zhang and Sennrich, 2019) on GPUs, in Triton.

A program takes one line, which it reads once, adds up in float32 and in an order that depends on
the line's length alone: a token's bits do not depend on its batch.
"""

import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.triton_jit import jit

_VALUES_PER_WARP = 1024
_MOST_WARPS = 16


@jit
def _normed(
    wide: tl.tensor, factors: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, TYPE: tl.constexpr
) -> tl.tensor:
    """A line of float32, rounded to TYPE; before the factors too, unless these are float32."""
    line = wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    if factors.dtype != tl.float32:
        line = line.to(TYPE).to(tl.float32)
    return (line * factors.to(tl.float32)).to(TYPE)


@jit
def _norm_kernel(
    values: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    post: tl.tensor,
    normed: tl.tensor,
    added: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    factor: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr,
    POST: tl.constexpr,
    FACTOR: tl.constexpr,
) -> None:
    """One program per line; lines are (token, head)."""
    TYPE: tl.constexpr = normed.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, TILE)
    mask = dims < SIZE
    line = (token * tl.num_programs(1) + head) * SIZE
    source = values + token * token_stride + head * head_stride
    factors = tl.load(weight + dims, mask=mask, other=0.0)  # under way with the others
    wide = tl.load(source + dims, mask=mask, other=0.0).to(tl.float32)
    if POST:
        before = tl.load(post + dims, mask=mask, other=0.0)
        wide = _normed(wide, before, eps, SIZE, TYPE).to(tl.float32)
    if FACTOR:
        wide = (wide * factor).to(TYPE).to(tl.float32)
    if RESIDUAL:
        wide += tl.load(residual + token * residual_stride + dims, mask=mask, other=0.0)
        rounded = wide.to(TYPE)
        tl.store(added + line + dims, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    if WEIGHT:
        tl.store(normed + line + dims, _normed(wide, factors, eps, SIZE, TYPE), mask=mask)


def _launch(
    values: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    post: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(normed, sum); without a residual, or without a weight, both are the same."""
    size = values.shape[-1]
    lines = values if values.dim() == 3 else values.unsqueeze(1)
    added = normed = values.new_empty(values.shape)
    if residual is not None and weight is not None:
        normed = values.new_empty(values.shape)
    tile = triton.next_power_of_2(size)
    if values.numel():
        _norm_kernel[lines.shape[:2]](
            values,
            values if residual is None else residual,
            values if weight is None else weight,
            values if post is None else post,
            normed,
            added,
            lines.stride(0),
            lines.stride(1),
            0 if residual is None else residual.stride(0),
            eps,
            factor,
            SIZE=size,
            TILE=tile,
            RESIDUAL=residual is not None,
            WEIGHT=weight is not None,
            POST=post is not None,
            FACTOR=factor != 1,
            enable_fp_fusion=True,
            num_warps=min(max(tile // _VALUES_PER_WARP, 1), _MOST_WARPS),
        )
    return normed, added


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """values / rms(values) * weight over the last dimension.

    Args:
        values: [T, size] or [T, heads, size], the last dimension contiguous.
        weight: [size], of the dtype of `values` or of float32.
        eps: added to the mean square.

    Returns:
        The shape and dtype of `values`, contiguous; rounded as `reference.rms_norm` does.
    """
    return _launch(values, None, weight, eps)[0]


def add_rms_norm(
    values: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    post: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`, in one pass; see there for the arguments."""
    return _launch(values, residual, weight, eps, post, factor)
