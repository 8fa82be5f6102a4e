"""Latents on the CPU: their attention, how they are written, and matrices by heads."""

import random
from dataclasses import replace

import pytest
import torch

from pagefleet_kernels import cpu_attention, cpu_latents, cpu_linear, reference
from tests.unit.kernels.paged_case import dense_attention, fresh_seed, latent_case
from tests.unit.kernels.test_cpu_attention import ERROR, part, random_rows

SHAPES = [
    pytest.param(16, 512, 64, 16, torch.bfloat16, id="deepseek-bfloat16"),
    pytest.param(5, 48, 16, 32, torch.float32, id="small-float32"),
    pytest.param(4, 40, 24, 16, torch.bfloat16, id="odd-bfloat16"),
    pytest.param(16, 512, 64, 16, torch.float32, id="deepseek-float32", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("heads", "rank", "turned", "block_size", "dtype"), SHAPES)
def test_agrees_with_dense_attention(heads, rank, turned, block_size, dtype):
    seed = fresh_seed()
    rows = random_rows(random.Random(seed))
    case = latent_case(rows, seed=seed, dtype=dtype, heads=heads, rank=rank, turned=turned)
    scale = (rank + turned) ** -0.5
    output = cpu_attention.attention(*case.arguments(), scale=scale)
    assert output.shape == (len(case.query), heads, rank)
    magnitudes = replace(case, values=[values.abs() for values in case.values])
    allowed = ERROR[dtype] * dense_attention(magnitudes, scale)
    assert ((output.double() - dense_attention(case, scale)).abs() <= allowed).all()


@pytest.mark.parametrize(("heads", "rank", "turned", "block_size", "dtype"), SHAPES)
def test_decode_prefill_chunks_and_threads_give_the_same_bits(
    heads, rank, turned, block_size, dtype
):
    seed = fresh_seed()
    chooser = random.Random(seed)
    length = chooser.randrange(260, 300)
    sizes = {"heads": heads, "rank": rank, "turned": turned, "block_size": block_size}
    case = latent_case([(0, length), (3, 2)], seed=seed, dtype=dtype, **sizes)
    whole = cpu_attention.attention(*case.arguments(), scale=0.2)[:length]
    begin, threads = 0, torch.get_num_threads()
    try:
        while begin < length:
            torch.set_num_threads(chooser.randint(1, 3))
            end = min(begin + chooser.choice([1, 2, 3, 4, 7, 16, 40]), length)
            chunk = cpu_attention.attention(*part(case, 0, begin, end), scale=0.2)
            assert torch.equal(chunk, whole[begin:end]), (begin, end)
            begin = end
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("sizes", [{"rank": 20}, {"block_size": 8}], ids=str)
def test_what_is_not_compiled_goes_to_the_reference(sizes):
    case = latent_case([(5, 4)], seed=fresh_seed(), **sizes)
    output = cpu_attention.attention(*case.arguments(), scale=0.1)
    assert torch.equal(output, reference.attention(*case.arguments(), scale=0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rank", "turned"), [(48, 16), (32, 32), (20, 4)])
def test_written_latents_are_those_of_the_reference(dtype, rank, turned):
    torch.manual_seed(fresh_seed())
    tokens, entry = 37, rank + turned
    fused = torch.randn(tokens, 3 + entry).to(dtype)
    query = torch.randn(tokens, 4, 24 + turned).to(dtype)
    angles = torch.rand(100, turned // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    places = torch.randint(100, (tokens,)), torch.randperm(6 * 16)[:tokens]
    found, expected = (torch.full((6, 1, 16, entry), torch.nan, dtype=dtype) for _ in range(2))
    latent, key = fused[:, 3:].split([rank, turned], dim=1)
    given = query, latent, key, cos_sin, places[0]
    rotated = cpu_latents.rotary_write_latents(*given, found, places[1])
    same = reference.rotary_write_latents(*given, expected, places[1])
    error = 1e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(rotated, same, atol=error, rtol=error)
    torch.testing.assert_close(found, expected, atol=error, rtol=error, equal_nan=True)
    assert torch.equal(rotated[..., :24], query[..., :24])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_head_has_its_matrix_and_a_row_its_bits(dtype):
    torch.manual_seed(fresh_seed())
    weights = torch.randn(5, 40, 24).to(dtype)
    layer, values = cpu_linear.by_heads(weights), torch.randn(70, 5, 24).to(dtype)
    found = layer(values)
    expected = reference.by_heads(weights.double())(values.double())
    error = 1e-5 if dtype is torch.float32 else 2**-5
    torch.testing.assert_close(found.double(), expected, atol=error, rtol=error)
    for begin, end in ((0, 1), (69, 70), (7, 60)):
        assert torch.equal(layer(values[begin:end]), found[begin:end])


def test_what_is_no_whole_word_goes_to_torch():
    weights = torch.randn(2, 3, 5).bfloat16()
    values = torch.randn(4, 2, 5).bfloat16()
    layer = cpu_linear.by_heads(weights)
    assert torch.equal(layer(values), reference.by_heads(weights)(values))
