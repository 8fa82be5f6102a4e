"""Numbers of 8 bits in Triton: e4m3 ("FP8 formats for deep learning", Micikevicius et al., 2022,
arXiv 2209.05433), one sign, four bits of exponent, three of fraction, no infinity.

Chips from compute capability 8.9 on convert in hardware. For the others, and for the interpreter,
the same is done on the bits: an e4m3 shifted to where a float16 has its exponent and fraction is a
float16 of 2 ** -8 times the value, subnormal numbers included.
"""

import triton.language as tl

from pagefleet_kernels.triton_jit import jit

_LARGEST = tl.constexpr(448.0)
_NAN = tl.constexpr(0x7F)
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_ULP_OF_SUBNORMAL = tl.constexpr(2.0**14)
"""Added to a float32, it leaves a multiple of 2 ** -9."""


@jit
def encode(values: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """float32 to the nearest e4m3, as uint8; what is too large becomes the largest."""
    limited = tl.minimum(tl.maximum(values, -_LARGEST), _LARGEST)
    if NATIVE:
        codes = limited.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        size = tl.abs(limited)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        shifted = (size + _ULP_OF_SUBNORMAL).to(tl.int32, bitcast=True)
        codes = tl.where(size < _SMALLEST_NORMAL, shifted & 0xF, normal)
        sign = (limited.to(tl.int32, bitcast=True) >> 24) & 0x80
        codes = (codes | sign).to(tl.uint8)
    return tl.where(values == values, codes, _NAN).to(tl.uint8)


@jit
def decode(codes: tl.tensor, TYPE: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """e4m3 as uint8 to a wider type, exactly."""
    if NATIVE:
        values = codes.to(tl.float8e4nv, bitcast=True).to(TYPE)
    else:
        wide = codes.to(tl.int16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        known = (wide & 0x7F) != _NAN
        values = tl.where(known, half * 256.0, float("nan")).to(TYPE)
    return values
