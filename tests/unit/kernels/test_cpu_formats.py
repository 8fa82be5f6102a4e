"""Numbers of 8 bits: every code, both ways to widen them, and the kernels around them."""

import math
import random
from dataclasses import replace

import numba
import pytest
import torch
from numba import types

from pagefleet_kernels import (
    cpu_attention,
    cpu_cache,
    cpu_formats,
    cpu_ir,
    cpu_rows,
    cpu_store,
    reference,
)
from pagefleet_kernels.cpu_ir import Format
from pagefleet_kernels.cpu_simd import load_floats, load_numbers, store_floats, store_numbers
from tests.unit.kernels.paged_case import PagedCase, as_panels, fresh_seed, paged_case, per_head
from tests.unit.kernels.test_cpu_attention import ERROR, part

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
    assert int(apart.sum()) < 9 * 3 * head_size // 100


def scales_of(heads: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-6, 3, (2, heads)).float()


def in_8_bits(case: PagedCase, scales: torch.Tensor) -> PagedCase:
    """The same, with caches of e4m3 over `scales`; keys in rows."""
    keys, values = (
        (cache.float() / each[:, None, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        for cache, each in zip((case.key_cache, case.value_cache), scales, strict=True)
    )
    return replace(case, key_cache=keys, value_cache=values)


SHAPES = [
    pytest.param(9, 3, 64, 16, torch.bfloat16, id="smollm2"),
    pytest.param(7, 1, 40, 48, torch.bfloat16, id="odd", marks=pytest.mark.slow),
    pytest.param(8, 1, 128, 16, torch.bfloat16, id="wide", marks=pytest.mark.slow),
    pytest.param(9, 3, 64, 16, torch.float32, id="smollm2-float32", marks=pytest.mark.slow),
    pytest.param(2, 2, 72, 32, torch.float32, id="odd-float32", marks=pytest.mark.slow),
    pytest.param(6, 2, 64, 16, torch.float16, id="float16", marks=pytest.mark.slow),
]


def random_case(
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
) -> tuple[PagedCase, torch.Tensor]:
    case = paged_case(
        rows,
        seed=fresh_seed(),
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
    )
    scales = scales_of(kv_heads)
    return in_8_bits(case, scales), scales


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 150}, {"softcap": 2.5, "slopes": True, "sinks": True}],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size", "dtype"), SHAPES)
def test_attention_agrees_with_the_reference(
    heads, kv_heads, head_size, block_size, dtype, options
):
    chooser = random.Random(fresh_seed())
    rows = [(chooser.choice([0, 1, 100, 127, 128, 300]), 1) for _ in range(4)]
    rows += [(start, chooser.choice([0, 2, 17, 50])) for start in (0, 15, 120, 128)]
    case, scales = random_case(rows, heads, kv_heads, head_size, block_size, dtype)
    options = {"scale": 0.1, "kv_scales": scales * 1.25, **per_head(options, heads)}
    query, *caches = case.arguments()
    caches[2] = caches[2].clamp(min=0)
    expected = reference.attention(query.double(), *caches, **options)
    caches[1] = caches[1] & 0x7F  # without signs
    magnitudes = reference.attention(query.double(), *caches, **options)
    found = cpu_attention.attention(*case.in_panels().arguments(), **options)
    assert found.dtype == dtype
    allowed = ERROR[dtype] * magnitudes + 2**-24  # of float16, as small as its numbers become
    assert ((found.double() - expected).abs() <= allowed).all()


def poisoned(case: PagedCase, first: int, end: int) -> PagedCase:
    """A case of one row, without the numbers of all but the positions `first` .. `end` - 1."""
    size, (keys, values) = case.key_cache.shape[2], (case.key_cache, case.value_cache)
    keys, values = keys.clone(), values.clone()
    for position in [*range(first), *range(end, int(case.offsets[1]))]:
        block = int(case.tables[0, position // size])
        keys[block, :, position % size] = values[block, :, position % size] = NAN
    return replace(case, key_cache=keys, value_cache=values)


@pytest.mark.parametrize("options", [{}, {"window": 150}], ids=["plain", "window"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size", "dtype"), SHAPES)
def test_decode_prefill_and_chunks_give_the_same_bits(
    heads, kv_heads, head_size, block_size, dtype, options
):
    """Each token as if those that it does not see, of which every number is NaN, were not there."""
    chooser = random.Random(fresh_seed())
    length = chooser.randrange(260, 420)
    case, scales = random_case([(0, length)], heads, kv_heads, head_size, block_size, dtype)
    window = options.get("window", length)
    options = {"scale": 0.2, "kv_scales": scales, **options}
    whole = cpu_attention.attention(*case.in_panels().arguments(), **options)
    assert not whole.isnan().any()
    for size in (1, 1, 2, 3, 4, 7, 16, 40):
        begin = chooser.randrange(length - size)
        end = begin + size
        seen = poisoned(case, begin + 1 - window, end)
        chunk = cpu_attention.attention(*part(seen.in_panels(), 0, begin, end), **options)
        assert torch.equal(chunk, whole[begin:end]), (begin, end)


def test_two_keys_that_are_weighted_at_once_always_are():
    """Of 224 + 2 ** -16, then + 224 - 448, the order decides what is left of 2 ** -16."""
    keys, values = torch.zeros(2, 1, 1, 16, 64)
    keys[..., 0, 0], keys[..., 4:, :], values[..., 4:, :] = 1.0, torch.nan, torch.nan
    values[..., :4, :] = torch.tensor([2**-9, 224.0, -448.0, 224.0])[:, None]
    query = torch.zeros(4, 3, 64, dtype=torch.bfloat16)
    query[..., 0] = -1.0  # times the first key and the scale, a weight of 2 ** -7 beside ones
    rows = torch.tensor([[0]]), torch.tensor([0]), torch.tensor([0, 4])
    case = PagedCase(query, keys, values, *(each.int() for each in rows), [], [])
    case = in_8_bits(case, torch.ones(2, 1)).in_panels()
    options = {"scale": math.log(128), "kv_scales": torch.ones(2, 1)}
    whole = cpu_attention.attention(*case.arguments(), **options)
    for token in range(4):
        alone = cpu_attention.attention(*part(case, 0, token, token + 1), **options)
        assert torch.equal(alone[0], whole[token])


@pytest.mark.slow
@pytest.mark.parametrize(("native", "head_size"), [(True, 88), (False, 104)])
def test_attention_on_processors_that_do_not_look_up(native, head_size, monkeypatch, tmp_path):
    """Of head sizes that no other test has, so that nothing is compiled already."""
    monkeypatch.setattr(cpu_store, "_folder", lambda: tmp_path)
    monkeypatch.setattr(cpu_formats, "LOOKS_UP", False)
    monkeypatch.setitem(cpu_rows._WORDS_OF_PAIRS, Format.E4M3, ())
    for module in (cpu_ir, cpu_rows):
        monkeypatch.setattr(module, "MULTIPLIES_BFLOAT16", native and cpu_ir.MULTIPLIES_BFLOAT16)
    shape = (6, 2, head_size, 16, torch.bfloat16)
    test_attention_agrees_with_the_reference(*shape, {})
    test_decode_prefill_and_chunks_give_the_same_bits(*shape, {"window": 150})


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "head_size"), [(9, 64), (3, 72)])
def test_attention_in_float32_has_the_bits_of_the_same_numbers_in_more(heads, head_size):
    rows = [(0, 1), (127, 1), (300, 1), (120, 50), (3, 17)]
    case, scales = random_case(rows, heads, 3, head_size, 16, torch.float32)
    found = cpu_attention.attention(*case.in_panels().arguments(), scale=0.1, kv_scales=scales)
    wide = (
        widened(cache) * each[:, None, None]
        for cache, each in zip((case.key_cache, case.value_cache), scales, strict=True)
    )
    case = replace(case, **dict(zip(("key_cache", "value_cache"), wide, strict=True)))
    assert torch.equal(found, cpu_attention.attention(*case.in_panels().arguments(), scale=0.1))
