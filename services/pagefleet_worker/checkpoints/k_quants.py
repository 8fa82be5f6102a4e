"""GGUF's K-quants as torch computes them: a few operations for many blocks.

A block holds 256 weights (ggml, ggml-common.h: `block_q4_K` and so on; ggml-quants.c:
`dequantize_row_q4_K` and so on). Its groups have small integer scales, which share a float16 of the
block:

    Q4_K    float16 d, float16 m, 8 scales and 8 minimums of 6 bits, 256 numbers of 4 bits
            weight = (d * scale) * number - (m * minimum)           8 groups of 32
    Q5_K    the same with numbers of 5 bits, whose highest come first, one of each group in a byte
    Q6_K    256 numbers of 6 bits (4 low, then 2 high), 16 scales int8, float16 d
            weight = (d * scale) * (number - 32)                    16 groups of 16

The order of the operations is that of ggml and of the `gguf` package, so that bits are theirs.

Groups of Q4_K are those of a `Quantized` too, whose scales and minimums are float16: these have 11
bits, products of a float16 and a number of 6 bits up to 17, so that 0.05 % of a scale may get lost.
"""

import torch
from torch import Tensor

from pagefleet_kernels.quantized import Quantized

_Q4_K_BYTES = 144
_Q5_K_BYTES = 176
_Q6_K_BYTES = 210


def dequantize_q4_k(rows: Tensor) -> Tensor:
    """uint8 [rows, whole blocks] as float32 [rows, weights]."""
    blocks = rows.view(-1, _Q4_K_BYTES)
    return _scaled(blocks[:, :16], _four_bits(blocks[:, 16:])).view(len(rows), -1)


def quantized_q4_k(rows: Tensor) -> Quantized:
    """uint8 [rows, whole blocks] in the file's own numbers."""
    blocks = rows.view(-1, _Q4_K_BYTES)
    numbers = _four_bits(blocks[:, 16:]).view(len(rows), -1)
    scales, minimums = _factors(blocks[:, :16])
    return Quantized(numbers, *(each.half().view(len(rows), -1) for each in (scales, -minimums)))


def dequantize_q5_k(rows: Tensor) -> Tensor:
    """uint8 [rows, whole blocks] as float32 [rows, weights]."""
    blocks = rows.view(-1, _Q5_K_BYTES)
    groups = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    numbers = _four_bits(blocks[:, 48:])
    numbers |= (blocks[:, 16:48].unsqueeze(1) >> groups & 1) << 4
    return _scaled(blocks[:, :16], numbers).view(len(rows), -1)


def dequantize_q6_k(rows: Tensor) -> Tensor:
    """uint8 [rows, whole blocks] as float32 [rows, weights]."""
    blocks = rows.view(-1, _Q6_K_BYTES)
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    factors = blocks[:, 208:].contiguous().view(torch.float16).float()
    numbers = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32)
    numbers |= torch.cat((high << 4, high << 2, high, high >> 2), dim=2) & 0x30
    numbers -= 32
    weights = numbers.view(torch.int8).view(-1, 16, 16) * (factors * scales).unsqueeze(-1)
    return weights.view(len(rows), -1)


K_QUANTS = {"Q4_K": dequantize_q4_k, "Q5_K": dequantize_q5_k, "Q6_K": dequantize_q6_k}
"""By their names in ggml."""


def _four_bits(packed: Tensor) -> Tensor:
    """uint8 [blocks, 128] as the numbers of uint8 [blocks, 8, 32], two groups in 32 bytes."""
    numbers = packed.reshape(-1, 4, 1, 32)
    return torch.cat((numbers & 15, numbers >> 4), dim=2).view(-1, 8, 32)


def _scaled(heads: Tensor, numbers: Tensor) -> Tensor:
    """Weights from d, m, scales and minimums, uint8 [blocks, 16], and uint8 [blocks, 8, 32]."""
    scales, minimums = _factors(heads)
    weights = numbers * scales.unsqueeze(-1)
    weights -= minimums.unsqueeze(-1)
    return weights


def _factors(heads: Tensor) -> tuple[Tensor, Tensor]:
    """What groups are multiplied by, and what is taken off then: both float32 [blocks, 8]."""
    factors = heads[:, :4].contiguous().view(torch.float16).float()
    scales, minimums = _six_bits(heads[:, 4:])
    return factors[:, :1] * scales, factors[:, 1:] * minimums


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and the minimums in uint8 [blocks, 12]: both uint8 [blocks, 8].

    The first four of each lie in the low bits of the first eight bytes. Of the others the last four
    bytes have the low four bits, scales below minimums, and the first eight the two high ones.
    """
    scales, minimums, both = packed.reshape(-1, 3, 4).unbind(1)
    return (
        torch.cat((scales & 63, both & 15 | scales >> 2 & 0x30), dim=-1),
        torch.cat((minimums & 63, both >> 4 | minimums >> 2 & 0x30), dim=-1),
    )
