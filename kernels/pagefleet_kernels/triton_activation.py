"""Gated activations of a feed-forward layer on GPUs, in Triton (SwiGLU, GEGLU: Shazeer, 2020)."""

import math

import triton
import triton.language as tl
from torch import Tensor

from pagefleet_kernels.layers import CLAMP, CLAMP_SLOPE, Activation
from pagefleet_kernels.triton_jit import jit

_TILE = 1024
_LINEAR = tl.constexpr(2 * math.sqrt(2 / math.pi))
_CUBIC = tl.constexpr(0.044715 * 2 * math.sqrt(2 / math.pi))
_CLAMP, _CLAMP_SLOPE = tl.constexpr(CLAMP), tl.constexpr(CLAMP_SLOPE)
_GELU_TANH = tl.constexpr(Activation.GELU_TANH.value)
_CLAMPED = tl.constexpr(Activation.CLAMPED.value)


@jit
def gate_values(
    gates: tl.tensor, values: tl.tensor, TYPE: tl.constexpr, ACTIVATION: tl.constexpr
) -> tl.tensor:
    """Gates, activated and rounded, times their values: float32, as what is given."""
    power = -gates
    if ACTIVATION == _GELU_TANH:  # 1 + tanh(y) = 2 sigmoid(2 y)
        power = tl.minimum(power * (_LINEAR + _CUBIC * gates * gates), 88.0)
    elif ACTIVATION == _CLAMPED:  # NaN stays what it is
        gates = tl.where(gates > _CLAMP, _CLAMP, gates)
        values = tl.where(values > _CLAMP, _CLAMP, tl.where(values < -_CLAMP, -_CLAMP, values)) + 1
        power = gates * -_CLAMP_SLOPE
    return (gates / (1 + tl.exp(power))).to(TYPE).to(tl.float32) * values


@jit
def _gate_mul_kernel(
    gate_up: tl.tensor,
    output: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    TILE: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """One program per (token, tile)."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = dims < size
    TYPE: tl.constexpr = output.dtype.element_ty
    source = gate_up + token * stride + dims
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=mask, other=0.0).to(tl.float32)
    gated = gate_values(gate, up, TYPE, ACTIVATION)
    tl.store(output + token * size + dims, gated.to(TYPE), mask=mask)


def gate_mul(gate_up: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    """`reference.gate_mul`.

    Args:
        gate_up: [T, 2 * size], the last dimension contiguous.
        activation: of the gates.

    Returns:
        [T, size] in the dtype of `gate_up`.
    """
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty((tokens, size))
    if tokens:
        _gate_mul_kernel[(tokens, triton.cdiv(size, _TILE))](
            gate_up,
            output,
            gate_up.stride(0),
            size,
            TILE=_TILE,
            ACTIVATION=activation.value,
            enable_fp_fusion=True,
        )
    return output
