"""Keys and values of 8 bits in Triton's interpreter: every code, and the kernels around them."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_interpreter.py runs it, interpreted", allow_module_level=True)

import torch
import triton
import triton.language as tl

from pagefleet_kernels import reference, triton_cache
from pagefleet_kernels.triton_attention import attention
from pagefleet_kernels.triton_fp8 import decode, encode
from pagefleet_kernels.triton_tiling import Tiling
from tests.unit.kernels.paged_case import fresh_seed, paged_case, per_head

NAN = 0x7F


@triton.jit
def _round_trip(values, codes, again, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    encoded = encode(tl.load(values + places), False)
    tl.store(codes + places, encoded)
    tl.store(again + places, decode(encoded, tl.float16, False))


def test_numbers_are_rounded_as_torch_rounds_them():
    torch.manual_seed(fresh_seed())
    values = torch.randn(4096) * 2.0 ** torch.randint(-14, 9, (4096,))
    steps = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values[:256] = steps
    values[256:511] = (steps[1:] + steps[:-1]) / 2  # ties
    values[511:515] = torch.tensor([1e9, -torch.inf, 449.0, -0.0])
    codes, again = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.float16)
    _round_trip[(1,)](values, codes, again, SIZE=4096)
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    number = ~values.isnan()
    assert torch.equal(codes[number], expected.view(torch.uint8)[number])
    assert bool((codes[~number] & 0x7F == NAN).all())
    assert torch.equal(again.nan_to_num(999), expected.to(torch.float16).nan_to_num(999))


def scales_of(heads):
    return 2.0 ** torch.randint(-6, 3, (2, heads)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes(dtype):
    torch.manual_seed(fresh_seed())
    key, value = torch.randn(2, 9, 3, 64).to(dtype)
    query, cos_sin = torch.randn(9, 6, 64).to(dtype), torch.rand(50, 64)
    positions, slots, scales = torch.randint(50, (9,)), torch.randperm(80)[:9], scales_of(3)
    found = torch.full((2, 2, 5, 3, 16, 64), NAN, dtype=torch.uint8)
    expected = found.clone()
    triton_cache.write_kv(key, value, *found[0], slots, scales)
    reference.write_kv(key, value, *expected[0], slots, scales)
    assert torch.equal(found[0], expected[0])
    arguments = query, key, value, cos_sin, positions
    triton_cache.rotary_write_kv(*arguments, *found[1], slots, scales)
    reference.rotary_write_kv(*arguments, *expected[1], slots, scales)
    numbers, expected_numbers = (
        each.view(torch.float8_e4m3fn).double() for each in (found, expected)
    )
    apart = (numbers - expected_numbers)[1].nan_to_num(0).abs()
    assert bool((apart <= expected_numbers[1].nan_to_num(0).abs() / 7 + 2**-8).all())
    assert int((apart != 0).sum()) < 9 * 3 * 64 * 2 // 20
    assert torch.equal(numbers.isnan(), expected_numbers.isnan())


@pytest.mark.parametrize("tiling", [None, Tiling(16, 32, 32, 3, 4, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype, tiling):
    case = paged_case([(0, 1), (70, 1), (33, 9)], seed=fresh_seed(), dtype=dtype, kv_heads=3)
    scales = scales_of(3)
    caches = [
        (cache.float() / each[:, None, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        for cache, each in zip((case.key_cache, case.value_cache), scales, strict=True)
    ]
    rows = case.tables.clamp(min=0), case.starts, case.offsets
    options = {"scale": 0.1, "kv_scales": scales, **per_head({"sinks": True}, 6)}
    found = attention(case.query, *caches, *rows, tiling=tiling, **options)
    expected = reference.attention(case.query.double(), *caches, *rows, **options)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert not found.isnan().any()
