"""Triton's kernels for latents in Triton's interpreter: against a dense oracle in float64 and
against `reference`.
"""

import dataclasses
import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_interpreter.py runs it, interpreted", allow_module_level=True)

import torch

from pagefleet_kernels import reference
from pagefleet_kernels.triton_attention import attention
from pagefleet_kernels.triton_latents import product_by_heads, rotary_write_latents
from pagefleet_kernels.triton_tiling import Tiling
from tests.unit.kernels.paged_case import dense_attention, fresh_seed, latent_case

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ROWS = [(0, 5), (40, 1), (17, 3), (70, 1)]


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize(
    ("heads", "rank", "turned", "block_size", "dtype"),
    [
        (5, 48, 16, 16, torch.float32),
        (16, 64, 32, 16, torch.bfloat16),
        (160, 32, 24, 32, torch.float16),
    ],
    ids=str,
)
def test_agrees_with_dense_attention(heads, rank, turned, block_size, dtype, invariant):
    sizes = {"heads": heads, "rank": rank, "turned": turned, "block_size": block_size}
    case = latent_case(ROWS, seed=fresh_seed(), dtype=dtype, **sizes)
    output = attention(*case.arguments(), scale=0.1, invariant=invariant)
    error = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), dense_attention(case, 0.1), rtol=error, atol=error)


def test_a_row_has_the_same_bits_in_every_batch():
    case = latent_case([(0, 3), (75, 1), (128, 7), (9, 2)], seed=fresh_seed(), heads=40)
    serial = Tiling(queries=32, keys=32, split=64, splits=1, warps=4, stages=2)
    concurrent = dataclasses.replace(serial, splits=4)
    options = {"scale": 0.125, "invariant": True}
    together = attention(*case.arguments(), tiling=serial, **options)
    torch.testing.assert_close(
        together.double(), dense_attention(case, 0.125), rtol=2e-6, atol=2e-6
    )
    assert torch.equal(attention(*case.arguments(), tiling=concurrent, **options), together)
    for row, (first, last) in enumerate([(0, 3), (3, 4), (4, 11), (11, 13)]):
        alone = attention(
            case.query[first:last],
            *case.arguments()[1:3],
            case.tables[row : row + 1],
            case.starts[row : row + 1],
            torch.tensor([0, last - first], dtype=torch.int32),
            tiling=serial,
            **options,
        )
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_written_latents_are_those_of_the_reference(dtype):
    torch.manual_seed(fresh_seed())
    tokens, rank, turned = 9, 40, 24
    fused = torch.randn(tokens, 7 + rank + turned).to(dtype)
    query = torch.randn(tokens, 5, 20 + turned).to(dtype)
    angles = torch.rand(100, turned // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions, slots = torch.randint(100, (tokens,)), torch.randperm(32)[:tokens]
    shape = 2, 1, 16, rank + turned
    found, expected = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    given = query, *fused[:, 7:].split([rank, turned], dim=1), cos_sin, positions
    rotated = rotary_write_latents(*given, found, slots)
    same = reference.rotary_write_latents(*given, expected, slots)
    error = TOLERANCE[dtype]
    torch.testing.assert_close(rotated, same, atol=error, rtol=error)
    torch.testing.assert_close(found, expected, atol=error, rtol=error, equal_nan=True)
    assert torch.equal(rotated[..., :20], query[..., :20])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_each_head_has_its_matrix_and_a_row_its_bits(dtype):
    torch.manual_seed(fresh_seed())
    weights = (torch.randn(3, 70, 40) / 7).to(dtype)
    values = torch.randn(70, 4, 40).to(dtype)[:, :3]
    found = product_by_heads(values, weights)
    expected = reference.by_heads(weights.double())(values.double())
    error = max(TOLERANCE[dtype], 1e-5)
    torch.testing.assert_close(found.double(), expected, atol=error, rtol=error)
    for begin, end in ((0, 1), (69, 70), (7, 30)):
        assert torch.equal(product_by_heads(values[begin:end], weights), found[begin:end])
