"""The gated activation of a feed-forward layer on GPUs, in Triton (SwiGLU, Shazeer, 2020)."""

import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.triton_jit import jit

_TILE = 1024


@jit
def _silu_mul_kernel(
    gate_up: tl.tensor, output: tl.tensor, stride: tl.tensor, size: tl.tensor, TILE: tl.constexpr
) -> None:
    """One program per (token, tile)."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = dims < size
    TYPE: tl.constexpr = output.dtype.element_ty
    source = gate_up + token * stride + dims
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(TYPE).to(tl.float32)
    tl.store(output + token * size + dims, (activated * up).to(TYPE), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension, times the second half.

    Args:
        gate_up: [T, 2 * size], the last dimension contiguous.

    Returns:
        [T, size] in the dtype of `gate_up`.
    """
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((tokens, size))
    if tokens:
        _silu_mul_kernel[(tokens, triton.cdiv(size, _TILE))](
            gate_up, output, gate_up.stride(0), size, TILE=_TILE, enable_fp_fusion=True
        )
    return output
