"""Bit by bit what the package `gguf` makes of the same blocks."""

import random

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pagefleet_worker.checkpoints.k_quants import K_QUANTS, quantized_q4_k

FACTORS = {"Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210)}
"""Where a block has its float16s."""


def random_blocks(name: str) -> np.ndarray:
    """uint8 [rows, whole blocks]."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    rows, blocks = int(generator.integers(1, 300)), int(generator.integers(1, 5))
    stored = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    where = FACTORS[name]
    factors = generator.normal(0, 0.01, (rows, blocks, (where.stop - where.start) // 2))
    stored[..., where] = factors.astype(np.float16).view(np.uint8)
    return stored.reshape(rows, -1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", K_QUANTS)
def test_random_blocks(name: str, threads: int) -> None:
    stored = random_blocks(name)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = K_QUANTS[name](torch.from_numpy(stored.copy()))
    finally:
        torch.set_num_threads(before)
    wanted = torch.from_numpy(dequantize(stored, GGMLQuantizationType[name]))
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def test_the_numbers_of_random_blocks() -> None:
    """They stay as they are; of scales and minimums a float16 is kept."""
    stored = random_blocks("Q4_K")
    matrix = quantized_q4_k(torch.from_numpy(stored.copy()))
    wanted = torch.from_numpy(dequantize(stored, GGMLQuantizationType.Q4_K))
    assert (matrix.bits, matrix.shape) == (4, wanted.shape)
    assert matrix.minimums is not None
    scales, minimums = matrix.scales.float().abs(), matrix.minimums.float().abs()
    smallest = torch.finfo(torch.float16).smallest_normal
    lost = 2**-11 * (16 * scales.clamp_min(smallest) + minimums.clamp_min(smallest))
    assert ((matrix.dequantized() - wanted).abs().view(*lost.shape, -1) <= lost.unsqueeze(-1)).all()
