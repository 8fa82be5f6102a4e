"""Bit by bit what the package `gguf` makes of the same blocks."""

import random

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pagefleet_worker.k_quants import K_QUANTS

FACTORS = {"Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(208, 210)}
"""Where a block has its float16s."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", K_QUANTS)
def test_random_blocks(name: str, threads: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)
    kind = GGMLQuantizationType[name]
    elements, size = GGML_QUANT_SIZES[kind]
    rows, blocks = int(generator.integers(1, 300)), int(generator.integers(1, 5))
    stored = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    where = FACTORS[name]
    factors = generator.normal(0, 0.01, (rows, blocks, (where.stop - where.start) // 2))
    stored[..., where] = factors.astype(np.float16).view(np.uint8)
    stored = stored.reshape(rows, -1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = K_QUANTS[name](torch.from_numpy(stored.copy()))
    finally:
        torch.set_num_threads(before)
    wanted = torch.from_numpy(dequantize(stored, kind))
    assert found.shape == (rows, blocks * elements)
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
