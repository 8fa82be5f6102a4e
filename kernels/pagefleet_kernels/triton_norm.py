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
def _norm_kernel(
    values: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    added: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """One program per line; lines are (token, head)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, TILE)
    mask = dims < SIZE
    line = (token * tl.num_programs(1) + head) * SIZE
    source = values + token * token_stride + head * head_stride
    factors = tl.load(weight + dims, mask=mask, other=0.0)  # under way with the others
    wide = tl.load(source + dims, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        wide += tl.load(residual + token * residual_stride + dims, mask=mask, other=0.0)
        rounded = wide.to(added.dtype.element_ty)
        tl.store(added + line + dims, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    TYPE: tl.constexpr = normed.dtype.element_ty
    result = ((wide * scale).to(TYPE).to(tl.float32) * factors.to(tl.float32)).to(TYPE)
    tl.store(normed + line + dims, result, mask=mask)


def _launch(values: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> list[Tensor]:
    """[normed] or, with a residual, [normed, values + residual]."""
    size = values.shape[-1]
    lines = values if values.dim() == 3 else values.unsqueeze(1)
    outputs = [values.new_empty(values.shape) for _ in range(1 if residual is None else 2)]
    tile = triton.next_power_of_2(size)
    if values.numel():
        _norm_kernel[lines.shape[:2]](
            values,
            values if residual is None else residual,
            weight,
            outputs[0],
            outputs[-1],
            lines.stride(0),
            lines.stride(1),
            0 if residual is None else residual.stride(0),
            eps,
            SIZE=size,
            TILE=tile,
            RESIDUAL=residual is not None,
            enable_fp_fusion=True,
            num_warps=min(max(tile // _VALUES_PER_WARP, 1), _MOST_WARPS),
        )
    return outputs


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """values / rms(values) * weight over the last dimension.

    Args:
        values: [T, size] or [T, heads, size], the last dimension contiguous.
        weight: [size].
        eps: added to the mean square.

    Returns:
        The shape and dtype of `values`, contiguous; rounded once before the weight and once after.
    """
    return _launch(values, None, weight, eps)[0]


def add_rms_norm(
    values: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(rms_norm(sum), sum) of sum = values + residual, in one pass: all are [T, size]."""
    normed, added = _launch(values, residual, weight, eps)
    return normed, added
