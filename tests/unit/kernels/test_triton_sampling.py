"""Triton's sampling in Triton's interpreter: each draw lies where float64 says it must."""

import os
from fractions import Fraction

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_triton_interpreter.py runs it, interpreted", allow_module_level=True)

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagefleet_kernels.triton_sampling import sample
from pagefleet_worker.sampling import philox

ROUNDING = 1e-5
"""How far the kernel's float32 probabilities may lie from float64's."""


def draw(logits, seed=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, choice=0, position=0):
    """One draw from one row of logits."""
    signed = seed - 2**64 if seed >= 2**63 else seed
    return int(
        sample(
            logits[None],
            torch.tensor([0]),
            torch.tensor([temperature]),
            torch.tensor([top_k], dtype=torch.int32),
            torch.tensor([top_p], dtype=torch.float64),
            torch.tensor([min_p]),
            torch.tensor([signed]),
            torch.tensor([choice], dtype=torch.int32),
            torch.tensor([position], dtype=torch.int32),
        )
    )


def probabilities_left(logits, temperature, top_k, top_p, min_p):
    """The oracle: sorted, in float64, equal ones by id."""
    weights = torch.softmax(logits.double() / temperature, -1)
    order = torch.sort(logits, descending=True, stable=True).indices
    if top_k and top_k < len(logits):
        weights[logits < logits[order[top_k - 1]]] = 0
    if top_p < 1:
        masses = weights[order] / weights.sum()
        before = masses.cumsum(0) - masses
        weights[order[before >= top_p]] = 0
    weights[weights < min_p * weights.max()] = 0
    return weights / weights.sum()


@settings(max_examples=15, deadline=None)
@given(
    size=st.sampled_from([1, 2, 500, 512, 513, 2048, 2049, 6000]),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    temperature=st.sampled_from([0.1, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 3000, 9000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    tied=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_draw_is_an_inverse_transform(size, spread, temperature, top_k, top_p, min_p, tied, seed):
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed % 2**63)) * spread
    if tied:
        logits = (logits * 2).round()
    cuts = (temperature, top_k, top_p, min_p)
    left = probabilities_left(logits, *cuts)
    for nearby in (-ROUNDING, ROUNDING):
        moved_p = top_p + nearby * (0 < top_p + nearby < 1)
        moved = (temperature, top_k, moved_p, min_p * (1 + nearby))
        assume(torch.equal(left > 0, probabilities_left(logits, *moved) > 0))
    token = draw(logits, seed, *cuts, choice=3, position=70000)
    uniform = philox.uniform(seed, 3, 70000)
    assert left[token] > 0
    assert left[:token].sum() - ROUNDING <= uniform <= left[: token + 1].sum() + ROUNDING


def test_the_uniform_number_is_philox_of_seed_choice_and_position():
    """Of equally likely tokens, a draw is the one that the number falls on."""
    logits = torch.zeros(4096)
    for seed, choice, position in [(0, 0, 0), (2**64 - 1, 7, 123456), (2**63, 1, 2**31 - 1)]:
        exact = Fraction(philox.draw_bits(seed, choice, position), 2**24)
        token = draw(logits, seed, choice=choice, position=position)
        assert token == exact * 4096 // 1


def test_top_p_keeps_the_lowest_ids_of_equal_tokens():
    logits = torch.tensor([0.0, 5.0, 0.0, 5.0, 5.0, 5.0])
    drawn = {draw(logits, seed, top_p=0.4) for seed in range(8)}
    assert drawn == {1, 3}


def test_top_k_keeps_whatever_equals_the_kth():
    logits = torch.tensor([0.0, 5.0, -0.0, 7.0, 5.0])
    drawn = {draw(logits, seed, temperature=2.0, top_k=2) for seed in range(12)}
    assert drawn == {1, 3, 4}


def test_greedy_takes_the_lowest_of_the_best():
    logits = torch.full((1400,), -torch.inf)
    logits[[700, 1300, 1399]] = 2.0
    assert draw(logits, temperature=0.0) == 700


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_gives_no_token(broken, temperature):
    logits = torch.randn(600)
    logits[599] = broken
    assert draw(logits, temperature=temperature, top_p=0.5) == -1
    assert draw(torch.full((10,), -torch.inf), temperature=temperature) == -1


def test_several_draws_may_read_one_row():
    logits = torch.randn(2, 500)
    count = 3
    tokens = sample(
        logits,
        torch.tensor([1, 0, 1]),
        torch.tensor([1.0, 0.0, 0.7]),
        torch.tensor([0, 0, 9], dtype=torch.int32),
        torch.ones(count, dtype=torch.float64),
        torch.zeros(count),
        torch.tensor([5, 6, 7]),
        torch.arange(count, dtype=torch.int32),
        torch.arange(count, dtype=torch.int32),
    )
    assert tokens[0] == draw(logits[1], 5)
    assert tokens[1] == logits[0].argmax()
    assert tokens[2] == draw(logits[1], 7, temperature=0.7, top_k=9, choice=2, position=2)
