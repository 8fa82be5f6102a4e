"""Triton's attention in Triton's interpreter: right against a dense oracle in float64, and the
same bits in every batch.
"""

import dataclasses
import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_interpreter.py runs it, interpreted", allow_module_level=True)

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from pagefleet_kernels import dispatch
from pagefleet_kernels.triton_attention import attention
from pagefleet_kernels.triton_tiling import Tiling, chip_of, choose_tiling
from tests.unit.kernels.paged_case import dense_attention, paged_case, per_head

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
BORDERS = [0, 1, 14, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65]
QUICK = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LONG = settings(QUICK, max_examples=150)

SEEDS = st.integers(0, 2**31 - 1)
ROWS = st.lists(
    st.tuples(st.sampled_from(BORDERS), st.sampled_from([0, 1, 1, 2, 5, 17])),
    min_size=1,
    max_size=3,
).filter(lambda rows: any(count for _, count in rows))
SHAPES = st.fixed_dictionaries(
    {
        "head_size": st.sampled_from([64, 80, 96, 128, 256]),
        "block_size": st.sampled_from([16, 32, 64]),
        "dtype": st.sampled_from(list(TOLERANCE)),
    }
)
HEADS = st.sampled_from([(1, 1), (3, 1), (4, 2), (7, 1)])
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "window": st.sampled_from([1, 5, 16, 33]),
        "softcap": st.just(3.0),
        "slopes": st.just(True),
        "sinks": st.just(True),
    },
)
TILINGS = st.one_of(
    st.none(),
    st.builds(
        Tiling,
        queries=st.sampled_from([16, 32]),
        keys=st.sampled_from([16, 32]),
        split=st.sampled_from([32, 64]),
        splits=st.sampled_from([1, 2, 5]),
        warps=st.just(4),
        stages=st.just(2),
    ),
)


def check_attention(rows, shape, heads, options, tiling, invariant, seed):
    heads, kv_heads = heads
    case = paged_case(rows, seed=seed, heads=heads, kv_heads=kv_heads, **shape)
    options = per_head(options, heads, seed)
    event(f"{'given' if tiling else 'chosen'} tiling, {len(rows)} rows")
    scale = shape["head_size"] ** -0.5
    output = attention(
        *case.arguments(), scale=scale, tiling=tiling, invariant=invariant, **options
    )
    tolerance = TOLERANCE[shape["dtype"]]
    expected = dense_attention(case, scale, **options)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


CASES = given(ROWS, SHAPES, HEADS, OPTIONS, TILINGS, st.booleans(), SEEDS)
test_agrees_with_dense_attention = QUICK(CASES(check_attention))
test_agrees_with_dense_attention_at_length = pytest.mark.slow(LONG(CASES(check_attention)))


def test_reads_nothing_that_the_window_has_passed():
    case = paged_case([(60, 3), (70, 1)], seed=1, block_size=16)
    window = 20
    expected = dense_attention(case, 0.125, window=window)
    for row, start in enumerate(case.starts.tolist()):
        passed = (start - window + 1) // 16
        case.key_cache[case.tables[row, :passed].long()] = torch.nan
        case.value_cache[case.tables[row, :passed].long()] = torch.nan
        case.tables[row, :passed] = -(2**30)
    output = attention(*case.arguments(), scale=0.125, window=window)
    torch.testing.assert_close(output.double(), expected, rtol=2e-6, atol=2e-6)


def test_takes_queries_out_of_a_fused_projection():
    case = paged_case([(10, 2), (0, 3)], seed=2)
    fused = torch.full((5, 10, 64), torch.nan)
    fused[:, :6] = case.query
    strided = dataclasses.replace(case, query=fused[:, :6])
    output = attention(*strided.arguments(), scale=0.125)
    expected = dense_attention(case, 0.125)
    torch.testing.assert_close(output.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("splits", [1, 3])
def test_passes_over_tokens_that_pad_the_batch(splits):
    case = paged_case([(100, 1), (0, 2)], seed=6)
    padded = dataclasses.replace(case, query=torch.cat((case.query, torch.full((60, 6, 64), 1.0))))
    tiling = Tiling(queries=16, keys=32, split=64, splits=splits, warps=4, stages=2)
    output = attention(*padded.arguments(), scale=0.125, tiling=tiling)
    expected = dense_attention(case, 0.125)
    torch.testing.assert_close(output[:3].double(), expected, rtol=2e-6, atol=2e-6)


def test_a_launch_is_right_for_every_length():
    """Tables of the greatest width, as in a captured graph: a row's own length sets its splits."""
    tiling = Tiling(queries=16, keys=16, split=32, splits=3, warps=4, stages=2)
    case = paged_case([(0, 1), (40, 1), (200, 1), (70, 5)], seed=7)
    wide = torch.full((4, 90), -(2**30), dtype=torch.int32)
    wide[:, : case.tables.shape[1]] = case.tables
    captured = dataclasses.replace(case, tables=wide)
    output = attention(*captured.arguments(), scale=0.125, tiling=tiling)
    expected = dense_attention(case, 0.125)
    torch.testing.assert_close(output.double(), expected, rtol=2e-6, atol=2e-6)


def test_answers_a_step_without_tokens():
    case = paged_case([(5, 0)], seed=3)
    assert attention(*case.arguments(), scale=0.125).shape == (0, 6, 64)


@pytest.mark.parametrize("options", [{}, {"window": 40, "sinks": True}], ids=str)
def test_a_row_has_the_same_bits_in_every_batch(options):
    case = paged_case([(0, 3), (75, 1), (128, 7), (9, 2)], seed=4, heads=4)
    serial = Tiling(queries=32, keys=32, split=64, splits=1, warps=4, stages=2)
    concurrent = dataclasses.replace(serial, splits=4)
    options = {"scale": 0.125, "invariant": True, **per_head(options, 4)}
    together = attention(*case.arguments(), tiling=serial, **options)
    assert torch.equal(attention(*case.arguments(), tiling=concurrent, **options), together)
    for row, start in enumerate(case.starts.tolist()):
        first, last = case.offsets[row : row + 2].tolist()
        for token in (first, last - 1):
            alone = attention(
                case.query[token : token + 1],
                case.key_cache,
                case.value_cache,
                case.tables[row : row + 1],
                torch.tensor([start + token - first], dtype=torch.int32),
                torch.tensor([0, 1], dtype=torch.int32),
                tiling=concurrent,
                **options,
            )
            assert torch.equal(alone[0], together[token])


def test_an_invariant_tiling_does_not_depend_on_the_batch():
    tilings = set()
    for rows in ([(0, 1)], [(900, 1)] * 40, [(0, 300), (5000, 1)]):
        case = paged_case(rows, seed=5, kv_heads=1, heads=2)
        chosen = choose_tiling(
            case.query, case.key_cache, case.tables, chip_of(case.query.device), invariant=True
        )
        tilings.add(dataclasses.replace(chosen, splits=1))
    assert len(tilings) == 1


def test_a_gpu_worker_gets_these_kernels():
    for invariant in (True, False):
        chosen = dispatch.select(torch.device("cuda"), invariant=invariant).attention
        assert chosen.func is attention
        assert chosen.keywords == {"invariant": invariant}
