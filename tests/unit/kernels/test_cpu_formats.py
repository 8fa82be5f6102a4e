"""Numbers of 8 bits: every code, both ways to widen them, and the kernels around them."""

import random

import numba
import pytest
import torch
from numba import types

from pagefleet_kernels import cpu_attention, cpu_cache, cpu_formats, cpu_ir, reference
from pagefleet_kernels.cpu_ir import Format
from pagefleet_kernels.cpu_simd import load_floats, load_numbers, store_floats, store_numbers
from tests.unit.kernels.paged_case import PagedCase, as_panels, fresh_seed, paged_case

NAN, E4M3 = 0x7F, Format.E4M3
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
FORMATS = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16}


def widened(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def test_numbers_are_rounded_as_torch_rounds_them():
    @numba.njit
    def run(source, target, size):
        for number in range(0, size, 16):
            store_numbers(E4M3, target + number, load_floats(source + number * 4))

    torch.manual_seed(fresh_seed())
    values = torch.randn(4096) * 2.0 ** torch.randint(-14, 9, (4096,))
    steps = widened(torch.arange(256, dtype=torch.uint8))
    values[:256] = steps
    values[256:511] = (steps[1:] + steps[:-1]) / 2  # ties
    values[511:518] = torch.tensor([1e9, -torch.inf, 449.0, -0.0, 2**-10, 1e-40, -torch.nan])
    found = torch.zeros(4096, dtype=torch.uint8)
    run(values.data_ptr(), found.data_ptr(), 4096)
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(found, expected)


def test_numbers_are_widened_exactly():
    @numba.njit
    def run(source, target):
        for number in range(0, 256, 16):
            store_floats(target + number * 4, load_numbers(E4M3, source + number))

    codes, found = torch.randperm(256).to(torch.uint8), torch.zeros(256)
    run(codes.data_ptr(), found.data_ptr())
    torch.testing.assert_close(found, widened(codes), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("looks_up", [True, False], ids=["looked-up", "shifted"])
@DTYPES
def test_words_are_widened_exactly(dtype, looks_up, monkeypatch):
    """On processors with tables of bytes, and as on all others."""
    if looks_up and not cpu_formats.LOOKS_UP:
        pytest.skip("this processor cannot")
    monkeypatch.setattr(cpu_formats, "LOOKS_UP", looks_up)

    @cpu_ir.intrinsic
    def read_words(typing, source, target):
        def lower(context, builder, signature, arguments):
            source, target = arguments
            words = cpu_formats.read_words(builder, FORMATS[dtype], Format.E4M3, source)
            for number, word in enumerate(words):
                cpu_ir.store(builder, word, cpu_ir.at(builder, target, 64 * number))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), lower

    @numba.njit
    def run(source, target):
        for line in range(4):
            read_words(source + line * 64, target + line * 64 * per_line)

    per_line = dtype.itemsize
    codes = torch.randperm(256).to(torch.uint8)
    found = torch.zeros(4, per_line, 16, 4 // per_line, dtype=dtype)
    run(codes.data_ptr(), found.data_ptr())
    expected = widened(codes).view(4, 16, per_line, 4 // per_line).transpose(1, 2).to(dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("head_size", [64, 24])
@DTYPES
def test_writes(dtype, head_size):
    torch.manual_seed(fresh_seed())
    fused = (torch.randn(9, 12, head_size) * 2.0 ** torch.randint(-9, 9, (9, 12, 1))).to(dtype)
    fused[3, 7, 5], fused[4, 10, 6] = torch.nan, torch.nan
    query, key, value = torch.split(fused, [6, 3, 3], dim=1)
    positions, slots = torch.randint(50, (9,)), torch.randperm(80)[:9]
    angles = torch.randn(50, head_size // 2)
    cos_sin, scales = torch.cat([angles.cos(), angles.sin()], -1), scales_of(3)
    rows = torch.full((2, 2, 5, 3, 16, head_size), NAN, dtype=torch.uint8)
    found = rows.clone()
    cpu_cache.write_kv(key, value, *found[0], slots, scales)
    reference.write_kv(key, value, *rows[0], slots, scales)
    arguments = query, key, value, cos_sin, positions
    rotated = cpu_cache.rotary_write_kv(*arguments, *found[1], slots, scales)
    plain = reference.rotary_write_kv(*arguments, *rows[1], slots, scales)
    torch.testing.assert_close(rotated, plain, rtol=8e-3, atol=1e-4, equal_nan=True)
    for each in rows:
        each[0] = as_panels(each[0])
    found, expected = widened(found), widened(rows)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[1], expected[1], rtol=1 / 7, atol=2**-8, equal_nan=True)
    apart = (found - expected)[1].nan_to_num(0) != 0
    assert int(apart.sum()) < 9 * 3 * head_size // 20


def scales_of(heads: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-6, 3, (2, heads)).float()


def in_8_bits(case: PagedCase, scales: torch.Tensor) -> tuple[list[torch.Tensor], PagedCase]:
    """The caches of a case in 8 bits and in panels, and the same numbers in the type they had."""
    caches = [
        (cache.float() / each[:, None, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        for cache, each in zip((case.key_cache, case.value_cache), scales, strict=True)
    ]
    for cache, each, before in zip(caches, scales, (case.key_cache, case.value_cache), strict=True):
        before.copy_(widened(cache) * each[:, None, None])
    pool = torch.stack([as_panels(caches[0]), caches[1]], dim=1)
    return [pool[:, 0], pool[:, 1]], case.in_panels()


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 150}, {"softcap": 2.5, "slopes": True}],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((9, 3, 64, 16), torch.bfloat16, id="smollm2-bfloat16"),
        pytest.param((9, 3, 64, 16), torch.float32, id="smollm2", marks=pytest.mark.slow),
        pytest.param((7, 1, 40, 48), torch.bfloat16, id="odd", marks=pytest.mark.slow),
        pytest.param((8, 1, 128, 16), torch.bfloat16, id="wide", marks=pytest.mark.slow),
        pytest.param((2, 2, 72, 32), torch.float32, id="odd-float32", marks=pytest.mark.slow),
    ],
)
def test_attention_has_the_bits_of_the_same_numbers_in_more(shape, dtype, options):
    """So all that is promised of wider caches is kept: decode, chunks, company, threads."""
    seed = fresh_seed()
    chooser = random.Random(seed)
    heads, kv_heads, head_size, block_size = shape
    rows = [(chooser.choice([0, 1, 100, 127, 128, 300]), 1) for _ in range(4)]
    rows += [(chooser.choice([0, 15, 16, 120, 128]), chooser.choice([0, 2, 17, 50]))] * 3
    case = paged_case(
        rows,
        seed=seed,
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
    )
    scales = scales_of(kv_heads)
    if "slopes" in options:
        options = {**options, "slopes": torch.rand(heads)}
    caches, wide = in_8_bits(case, scales)
    query, keys, values, *rest = wide.arguments()
    found = cpu_attention.attention(query, *caches, *rest, scale=0.1, kv_scales=scales, **options)
    expected = cpu_attention.attention(query, keys, values, *rest, scale=0.1, **options)
    assert torch.equal(found, expected)
    assert not found.isnan().any()


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.bfloat16, 2e-2),
        pytest.param(torch.float32, 2e-6, marks=pytest.mark.slow),
        pytest.param(torch.float16, 2e-3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention_agrees_with_the_reference_whatever_the_scales(dtype, tolerance):
    torch.manual_seed(fresh_seed())
    case = paged_case([(0, 1), (130, 1), (33, 9)], seed=fresh_seed(), dtype=dtype)
    scales = torch.rand(2, 2) + 0.1
    (keys, values), _ = in_8_bits(case, scales)
    rest = case.tables.clamp(min=0), case.starts, case.offsets
    rows = as_panels(keys)  # sixteen words by sixteen keys, turned back
    options = {"scale": 0.1, "kv_scales": scales}
    expected = reference.attention(case.query.double(), rows, values, *rest, **options)
    found = cpu_attention.attention(case.query, keys, values, *rest, **options)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
