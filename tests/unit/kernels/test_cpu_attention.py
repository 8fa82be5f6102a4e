"""The compiled attention: right against a dense oracle, and the same bits however it is called."""

import random
from dataclasses import replace

import pytest
import torch

from pagefleet_kernels import cpu_attention, reference
from tests.unit.kernels.paged_case import (
    PagedCase,
    dense_attention,
    fresh_seed,
    paged_case,
    per_head,
)

SHAPES = [
    pytest.param(9, 3, 64, 16, torch.float32, id="smollm2-float32"),
    pytest.param(9, 3, 64, 16, torch.bfloat16, id="smollm2-bfloat16"),
    pytest.param(7, 1, 40, 48, torch.bfloat16, id="odd-bfloat16"),
    pytest.param(70, 70, 16, 16, torch.float32, id="many-float32"),
    pytest.param(70, 70, 8, 16, torch.float32, id="narrow-float32", marks=pytest.mark.slow),
    pytest.param(2, 2, 72, 32, torch.float32, id="odd-float32", marks=pytest.mark.slow),
]
ERROR = {torch.float32: 2**-18, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""How far a sum of weighted values may be off, as a part of the sum of their magnitudes: each
weight is rounded once, and the sum once; in float32 there is room for 32 roundings.
"""
OPTIONS = [
    {},
    {"window": 150},
    {"softcap": 2.5},
    {"slopes": True},
    {"window": 150, "sinks": True},
]


def random_rows(generator: random.Random) -> list[tuple[int, int]]:
    """Rows around the borders of tiles, blocks and tasks, empty and one-token rows among them."""
    lengths = [0, 1, 2, 3, 5, 16, 17, 50]
    starts = [0, 1, 15, 16, 100, 126, 127, 128, 129, 255, 256, 300]
    return [(generator.choice(starts), generator.choice(lengths)) for _ in range(6)] + [(300, 1)]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size", "dtype"), SHAPES)
def test_agrees_with_dense_attention(heads, kv_heads, head_size, block_size, dtype, options):
    seed = fresh_seed()
    case = paged_case(
        random_rows(random.Random(seed)),
        seed=seed,
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
    ).in_panels()
    options = per_head(options, heads, seed)
    scale = head_size**-0.5
    output = cpu_attention.attention(*case.arguments(), scale=scale, **options)
    expected = dense_attention(case, scale, **options)
    magnitudes = replace(case, values=[values.abs() for values in case.values])
    allowed = ERROR[dtype] * dense_attention(magnitudes, scale, **options)
    assert ((output.double() - expected).abs() <= allowed).all()


def part(case: PagedCase, row: int, begin: int, end: int) -> tuple[torch.Tensor, ...]:
    """The arguments that compute only the tokens `begin` .. `end` - 1 of a row."""
    first = int(case.offsets[row])
    return (
        case.query[first + begin : first + end],
        case.key_cache,
        case.value_cache,
        case.tables[row : row + 1],
        case.starts[row : row + 1] + begin,
        torch.tensor([0, end - begin], dtype=torch.int32),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size", "dtype"), SHAPES)
def test_decode_prefill_and_chunks_give_the_same_bits(
    heads, kv_heads, head_size, block_size, dtype, options
):
    seed = fresh_seed()
    chooser = random.Random(seed)
    length = chooser.randrange(260, 420)
    case = paged_case(
        [(0, length), (3, 2)],
        seed=seed,
        dtype=dtype,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
    ).in_panels()
    options = per_head(options, heads, seed)
    whole = cpu_attention.attention(*case.arguments(), scale=0.2, **options)[:length]
    begin = 0
    while begin < length:
        size = chooser.choice([1, 2, 3, 4, 7, 16, 40])
        end = min(begin + size, length)
        chunk = cpu_attention.attention(*part(case, 0, begin, end), scale=0.2, **options)
        assert torch.equal(chunk, whole[begin:end]), (begin, end)
        begin = end
    for position in chooser.sample(range(length), 40):
        token = part(case, 0, position, position + 1)
        decoded = cpu_attention.attention(*token, scale=0.2, **options)
        assert torch.equal(decoded[0], whole[position]), position


def test_threads_and_batch_do_not_change_a_bit():
    seed = fresh_seed()
    rows = [*random_rows(random.Random(seed)), (500, 1), (0, 200)]
    case = paged_case(rows, seed=seed, dtype=torch.bfloat16).in_panels()
    threads = torch.get_num_threads()
    outputs = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outputs.append(cpu_attention.attention(*case.arguments(), scale=0.1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    for row, (_, count) in enumerate(rows):
        if count:
            alone = cpu_attention.attention(*part(case, row, 0, count), scale=0.1)
            first = int(case.offsets[row])
            assert torch.equal(alone, outputs[0][first : first + count]), row


def test_sinks_of_any_size_take_their_part():
    case = paged_case([(300, 1), (20, 40)], seed=fresh_seed(), heads=6)
    sinks = torch.tensor([-1e4, -100, 0, 60, 100, 1e4])
    output = cpu_attention.attention(*case.in_panels().arguments(), scale=0.1, sinks=sinks)
    expected = dense_attention(case, 0.1, sinks=sinks)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=2e-6)
    without = cpu_attention.attention(*case.in_panels().arguments(), scale=0.1)
    assert torch.equal(output[:, :2], without[:, :2])


def test_nan_in_a_later_token_or_another_row_stays_there():
    case = paged_case([(130, 20), (140, 1)], seed=fresh_seed())
    clean = cpu_attention.attention(*case.in_panels().arguments(), scale=0.1)
    block, slot = int(case.tables[0, 144 // 16]), 144 % 16
    case.key_cache[block, :, slot] = torch.nan
    case.value_cache[block, :, slot] = torch.nan
    output = cpu_attention.attention(*case.in_panels().arguments(), scale=0.1)
    assert torch.equal(output[:14], clean[:14])
    assert output[14:20].isnan().all()
    assert torch.equal(output[20], clean[20])


def test_queries_may_be_a_slice_of_a_fused_projection():
    case = paged_case([(20, 3), (40, 1)], seed=fresh_seed()).in_panels()
    fused = torch.randn(4, 10, 64)
    query, *others = case.arguments()
    fused[:, 2:8] = query
    output = cpu_attention.attention(fused[:, 2:8], *others, scale=0.1)
    assert torch.equal(output, cpu_attention.attention(query, *others, scale=0.1))


def test_queries_of_another_type_are_rounded_to_that_of_the_caches():
    case = paged_case([(20, 3), (40, 1)], seed=fresh_seed(), dtype=torch.bfloat16).in_panels()
    query, *others = case.arguments()
    output = cpu_attention.attention(query.double(), *others, scale=0.1)
    assert torch.equal(output, cpu_attention.attention(query, *others, scale=0.1).double())


@pytest.mark.parametrize("shape", [{"head_size": 12}, {"block_size": 5}], ids=str)
def test_what_is_not_compiled_goes_to_the_reference(shape):
    case = paged_case([(5, 4)], seed=fresh_seed(), **shape)
    output = cpu_attention.attention(*case.arguments(), scale=0.1)
    assert torch.equal(output, reference.attention(*case.arguments(), scale=0.1))


def test_caches_whose_blocks_are_in_pieces_are_refused():
    case = paged_case([(5, 4)], seed=fresh_seed(), block_size=32)
    query, keys, values, *others = case.arguments()
    for caches in ((keys[..., ::2, :], values[..., ::2, :]), (keys, values[:, :1])):
        with pytest.raises(ValueError, match="in one piece"):
            cpu_attention.attention(query, *caches, *others, scale=0.1)
