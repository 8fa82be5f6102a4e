"""Triton's writes into the pool in Triton's interpreter, against the reference."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_interpreter.py runs it, interpreted", allow_module_level=True)

import torch

from pagefleet_kernels import reference, triton_cache
from tests.unit.kernels.paged_case import fresh_seed

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def pool_of(shape, dtype):
    """Two layers' caches, poisoned: a layer's caches are views of one tensor."""
    return torch.full((2, 2, *shape), torch.nan).to(dtype)


def fused_projection(tokens, heads, kv_heads, head_size, dtype):
    """Queries, keys and values as views of one tensor, as the model makes them."""
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_size).to(dtype)
    return fused.split([heads, kv_heads, kv_heads], dim=1)


def same(left, right):
    return torch.equal(left.nan_to_num(999), right.nan_to_num(999))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [*zip(DTYPES, DTYPES, strict=True), (torch.float32, torch.float16)],
)
@pytest.mark.parametrize(("kv_heads", "head_size", "block_size"), [(3, 64, 16), (1, 80, 32)])
def test_write_kv_stores_the_tokens_and_nothing_else(
    kv_heads, head_size, block_size, dtype, cache_dtype
):
    torch.manual_seed(fresh_seed())
    pool = pool_of((5, kv_heads, block_size, head_size), cache_dtype)
    _, key, value = fused_projection(9, 2 * kv_heads, kv_heads, head_size, dtype)
    slots = torch.randperm(5 * block_size)[:9]
    expected = pool.clone()
    reference.write_kv(key, value, expected[1, 0], expected[1, 1], slots)
    triton_cache.write_kv(key, value, pool[1, 0], pool[1, 1], slots)
    assert same(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 2, 64), (3, 1, 96), (5, 5, 80)])
def test_rotary_write_kv_agrees_with_complex_rotation(heads, kv_heads, head_size, dtype):
    torch.manual_seed(fresh_seed())
    pool = pool_of((4, kv_heads, 16, head_size), dtype)
    query, key, value = fused_projection(6, heads, kv_heads, head_size, dtype)
    angles = torch.rand(50, head_size // 2) * 6
    positions, slots = torch.randint(50, (6,)), torch.randperm(64)[:6]

    def rotated(values):
        pairs = torch.complex(*values.double().chunk(2, dim=-1))
        turned = pairs * torch.polar(torch.tensor(1.0).double(), angles[positions, None].double())
        return torch.cat((turned.real, turned.imag), dim=-1)

    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    output = triton_cache.rotary_write_kv(
        query, key, value, cos_sin, positions, pool[0, 0], pool[0, 1], slots
    )
    tolerance = {"rtol": 3 * torch.finfo(dtype).eps, "atol": 2e-6}
    torch.testing.assert_close(output.double(), rotated(query), **tolerance)
    stored = pool[0, 0][slots // 16, :, slots % 16]
    torch.testing.assert_close(stored.double(), rotated(key), **tolerance)
    assert torch.equal(pool[0, 1][slots // 16, :, slots % 16], value)
    assert int(pool.isnan().any(-1).logical_not().sum()) == 2 * 6 * kv_heads


@pytest.mark.parametrize("shape", [(8, 2, 16, 80), (2, 2, 8, 1, 16, 64), (3, 8, 5, 32, 64)])
def test_copy_blocks_copies_every_plane(shape):
    torch.manual_seed(fresh_seed())
    caches = torch.randn(shape).to(torch.bfloat16)
    blocks = torch.randperm(8)
    pairs = torch.stack((blocks[[0, 0, 1]], blocks[[3, 4, 5]]), dim=1)
    expected = caches.clone()
    reference.copy_blocks(expected, pairs)
    triton_cache.copy_blocks(caches, pairs)
    assert torch.equal(caches, expected)
    triton_cache.copy_blocks(caches, pairs[:0])
    assert torch.equal(caches, expected)


def test_empty_steps_write_nothing():
    pool = pool_of((2, 1, 16, 64), torch.float16)
    query, key, value = fused_projection(0, 2, 1, 64, torch.float16)
    slots = torch.empty(0, dtype=torch.int64)
    triton_cache.write_kv(key, value, pool[0, 0], pool[0, 1], slots)
    rotated = triton_cache.rotary_write_kv(
        query, key, value, torch.ones(1, 64), slots, pool[0, 0], pool[0, 1], slots
    )
    assert rotated.shape == (0, 2, 64)
    assert bool(pool.isnan().all())
