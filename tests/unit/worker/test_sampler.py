"""The sampler against transformers' processors and warpers, chi-square and itself."""

import math
import random
from array import array
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.generation import logits_process as oracle

from pagefleet.params import SamplingParams
from pagefleet.wire import unpack_floats, unpack_ints
from pagefleet_worker.sampling.draw import NO_TOKEN, Draw
from pagefleet_worker.sampling.logprobs import DrawLogprobs, rank
from pagefleet_worker.sampling.philox import draw_bits
from pagefleet_worker.sampling.sampler import random_bits, sample, weights_left
from pagefleet_worker.sampling.selection import (
    WEIGHT_ONE,
    chunk_rows,
    inverse_transform,
    largest,
    top,
    weights_of,
)
from pagefleet_worker.sampling.shaping import shape

SIZES = (7, 256, 1000, 1537, 5000)


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    torch.manual_seed(seed)
    return random.Random(seed)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 100, "seed": 0} | fields))


def draws_of(fields: list[dict[str, object]], prompt: list[int], output: list[int]) -> list[Draw]:
    history = array("i", prompt + output)
    return [
        Draw(row, params(**each), history, len(prompt), row, len(output))
        for row, each in enumerate(fields)
    ]


def any_fields(rng: random.Random, size: int) -> dict[str, object]:
    """Parameters with a random part of all features."""
    tokens = range(size)
    choices: dict[str, object] = {
        "temperature": rng.choice((0.0, 0.3, 1.0, 1.7)),
        "top_k": rng.choice((1, 3, 50, 256, 1000)),
        "top_p": rng.choice((0.1, 0.5, 0.9, 0.999)),
        "min_p": rng.choice((0.01, 0.2)),
        "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "logit_bias": {token: rng.uniform(-50, 50) for token in rng.sample(tokens, 3)},
        "bad_words": tuple((token,) for token in rng.sample(tokens, 3)),
        "allowed_token_ids": tuple(rng.sample(tokens, rng.randint(4, size))),
        "eos_token_ids": (rng.choice(tokens),),
        "min_tokens": 20,
    }
    wanted = rng.sample(sorted(choices), rng.randint(0, len(choices)))
    return {name: choices[name] for name in wanted} | {"seed": rng.getrandbits(64)}


def test_random_bits_are_those_of_philox(rng: random.Random) -> None:
    draws = [
        Draw(0, params(seed=rng.getrandbits(64)), [], 0, rng.getrandbits(16), rng.getrandbits(31))
        for _ in range(100)
    ]
    expected = [draw_bits(draw.params.seed, draw.choice, draw.position) for draw in draws]
    assert random_bits(draws).tolist() == expected


@pytest.mark.parametrize("size", SIZES)
def test_selection_puts_the_lower_id_first_among_equals(size: int, rng: random.Random) -> None:
    values = (torch.randn(5, size) * 2).round()
    ids = values.sort(dim=-1, descending=True, stable=True).indices
    assert torch.equal(largest(values), ids[:, 0])
    assert torch.equal(top(values, size), ids)
    assert torch.equal(top(values, min(20, size)), ids[:, :20])


@pytest.mark.parametrize("size", SIZES)
def test_inverse_transform_agrees_with_plain_integers(size: int, rng: random.Random) -> None:
    weights = weights_of(torch.randn(6, size) * 3)
    weights[torch.rand(6, size) < 0.5] = 0
    weights[:, -1] += 1
    bits = torch.tensor([0, 2**24 - 1, *(rng.getrandbits(24) for _ in range(4))])
    for row, chosen in enumerate(inverse_transform(weights, bits).tolist()):
        cumulative = list(accumulate(weights[row].tolist()))
        target = int(bits[row]) * cumulative[-1]
        assert chosen == next(
            token for token, weight in enumerate(cumulative) if weight * 2**24 > target
        )


def test_greedy_is_argmax_with_the_lowest_id_on_ties(rng: random.Random) -> None:
    logits = torch.randn(8, 1000).bfloat16().float()
    draws = draws_of([{"temperature": 0.0}] * 8, [1, 2], [3])
    assert torch.equal(sample(logits, draws), logits.argmax(-1))
    logits[3, [70, 400]] = 99.0
    assert sample(logits, draws)[3] == 70


def test_penalties_and_masks_are_those_of_transformers(rng: random.Random) -> None:
    size = 300
    prompt = [rng.randrange(size) for _ in range(40)]
    output = [rng.randrange(20) for _ in range(60)]
    logits = torch.randn(1, size) * 4
    ids = torch.tensor([prompt + output])
    words = [[5], [output[-1], 6], [output[-2], output[-1], 7], [output[-1] + 1, 8]]
    for penalty in (0.6, 1.4):
        scores = logits.clone()
        fields = {
            "repetition_penalty": penalty,
            "bad_words": tuple(map(tuple, words)),
            "logit_bias": {9: 3.0, 250: -4.0, 5: 100.0},
            "eos_token_ids": (2, 3),
            "min_tokens": 61,
        }
        shape(scores, draws_of([fields], prompt, output))
        expected = logits.clone()
        for processor in (
            oracle.NoBadWordsLogitsProcessor(words),
            oracle.MinNewTokensLengthLogitsProcessor(len(prompt), 61, [2, 3], device="cpu"),
            oracle.SequenceBiasLogitsProcessor([[[9], 3.0], [[250], -4.0], [[5], 100.0]]),
            oracle.RepetitionPenaltyLogitsProcessor(penalty),
        ):
            expected = processor(ids, expected)
        assert torch.equal(scores, expected)


def test_frequency_and_presence_count_the_output_only(rng: random.Random) -> None:
    logits = torch.randn(1, 50)
    output = [rng.randrange(10) for _ in range(30)]
    scores = logits.clone()
    fields = {"frequency_penalty": 0.3, "presence_penalty": -0.7}
    shape(scores, draws_of([fields], list(range(50)), output))
    for token in range(50):
        count = output.count(token)
        expected = logits[0, token].item() - 0.3 * count + 0.7 * (count > 0)
        assert scores[0, token].item() == pytest.approx(expected, abs=1e-5)


def test_only_allowed_tokens_are_drawn(rng: random.Random) -> None:
    """Each of them: the least likely of three whose logits lie within one is one draw in seven."""
    allowed = (3, 14, 900)
    fields = [{"allowed_token_ids": allowed, "seed": seed} for seed in range(200)]
    logits = torch.rand(1, 1000).repeat(200, 1)
    assert set(sample(logits, draws_of(fields, [], [])).tolist()) == set(allowed)


def transformers_kept(scores: Tensor, each: SamplingParams) -> set[int]:
    """By its own cuts, of [1, V] float32; in float64 from the scaled scores on."""
    scores = oracle.TemperatureLogitsWarper(each.temperature)(None, scores).double()
    warpers = []
    if each.top_k:
        warpers.append(oracle.TopKLogitsWarper(each.top_k))
    if each.top_p < 1:
        warpers.append(oracle.TopPLogitsWarper(each.top_p))
    if each.min_p:
        warpers.append(oracle.MinPLogitsWarper(each.min_p))
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.int64), scores)
    return set(scores.isfinite().nonzero()[:, 1].tolist())


def least_and_most_kept(scores: Tensor, fields: dict[str, Any]) -> list[set[int]]:
    """What is kept by cuts that are a little sharper, and by ones that are a little duller.

    Of 5000 weights each may be half a unit of `WEIGHT_ONE` off, and a part in a million by float32:
    their sums are off by less than 1e-5. What min_p makes of the greatest weight is 20,000 units at
    least where logits are spread as in these tests: rounding is less than 1e-4 of it.
    """
    return [
        transformers_kept(scores, params(**fields | {"top_p": top_p, "min_p": min_p}))
        for sign in (-1, 1)
        for top_p in [min(1.0, fields.get("top_p", 1.0) + sign * 1e-5)]
        for min_p in [fields.get("min_p", 0.0) * (1 - sign * 1e-4)]
    ]


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_the_sets_kept_are_those_of_transformers(spread: float, rng: random.Random) -> None:
    """The best ones, and as many: more than sharper cuts keep and fewer than duller ones, but for
    those too improbable for a weight. Which of two equal ones at a border is not said.
    """
    fields: list[dict[str, Any]] = [
        {
            "temperature": rng.choice((0.7, 1.0, 1.3)),
            "top_k": rng.choice((0, 1, 40, 255, 256, 257, 2000)),
            "top_p": rng.choice((1.0, 0.2, 0.9, 0.99)),
            "min_p": rng.choice((0.0, 0.0, 0.05)),
        }
        for _ in range(24)
    ]
    logits = torch.randn(24, 5000) * spread
    kept = weights_left(logits, [params(**each) for each in fields]) > 0
    for row, each in enumerate(fields):
        scaled = logits[row] / each["temperature"]
        vanishing = set((scaled.softmax(-1) < 2 / WEIGHT_ONE).nonzero()[:, 0].tolist())
        least, most = least_and_most_kept(logits[row : row + 1], each)
        assert len(least - vanishing) <= int(kept[row].sum()) <= len(most), each
        assert not (scaled[~kept[row]] > scaled[kept[row]].min()).any(), each


def test_top_k_keeps_all_that_equal_the_kth(rng: random.Random) -> None:
    logits = torch.zeros(1, 2500)
    logits[0, :2] = 1.0
    fields = [{"top_k": 3, "seed": seed} for seed in range(64)]
    tokens = sample(logits.repeat(64, 1), draws_of(fields, [], []))
    assert int(tokens.max()) > 1024


def test_top_p_takes_the_lower_ids_of_equals() -> None:
    fields = [{"top_p": 0.25, "seed": seed} for seed in range(200)]
    tokens = sample(torch.zeros(200, 4000), draws_of(fields, [], []))
    assert 900 < int(tokens.max()) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.5},
    ],
)
def test_tokens_are_distributed_as_the_probabilities_say(
    fields: dict[str, object], rng: random.Random
) -> None:
    """Over the positions of one seeded stream. A sampler that is right fails once in ten thousand
    million runs at most: of n draws from k tokens, n times the relative entropy of what was drawn
    exceeds G > k - 1 with a chance of e^-G (e G / (k - 1))^(k - 1) at most (Agrawal 2020,
    "Finite-Sample Concentration of the Multinomial in Relative Entropy").
    """
    each = params(seed=rng.getrandbits(64), **fields)
    least = most = None
    while least is None or least != most:  # a token at the border may be kept or not
        logits = torch.randn(1, 12) * 1.5
        least, most = least_and_most_kept(logits, fields)
    kept, count = sorted(least), 45_000
    draws = [Draw(0, each, [], 0, 0, position) for position in range(count)]
    observed = Counter(sample(logits, draws).tolist())
    assert set(observed) <= set(kept)
    expected = (logits[0, kept].double() / each.temperature).softmax(-1) * count
    found = torch.tensor([observed[token] for token in kept]).double()
    divergence, degrees = torch.xlogy(found, found / expected).sum().item(), max(1, len(kept) - 1)
    if divergence > degrees:
        assert divergence - degrees * (1 + math.log(divergence / degrees)) < math.log(1e10)


def test_a_row_is_the_same_alone_and_among_others(rng: random.Random) -> None:
    size = 1537
    logits = torch.randn(32, size) * 3
    logits[::4] = logits[::4].bfloat16().float()
    prompt = [rng.randrange(size) for _ in range(30)]
    output = [rng.randrange(size) for _ in range(10)]
    draws = draws_of([any_fields(rng, size) for _ in range(32)], prompt, output)
    together = sample(logits, draws).tolist()
    order = rng.sample(range(32), 32)
    assert sample(logits, [draws[row] for row in order]).tolist() == [together[r] for r in order]
    for row, each in enumerate(draws):
        alone = Draw(0, each.params, each.history, each.prompt_length, each.choice, each.position)
        assert sample(logits[row : row + 1], [alone]).tolist() == [together[row]], each.params


def test_several_choices_draw_from_one_row_and_leave_it(rng: random.Random) -> None:
    logits = torch.rand(1, 100)  # so that the favoured one is three draws in four at most
    before = logits.clone()
    each = params(logit_bias={1: 5.0})
    tokens = sample(logits, [Draw(0, each, [], 0, choice, 0) for choice in range(64)])
    assert len(set(tokens.tolist())) > 1
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_where_none_can_be_chosen(temperature: float) -> None:
    logits = torch.zeros(4, 600)
    logits[0, 300] = math.nan
    logits[1, 300] = math.inf
    fields: list[dict[str, object]] = [
        {},
        {},
        {"allowed_token_ids": (5,), "bad_words": ((5,),)},
        {},
    ]
    draws = draws_of([each | {"temperature": temperature} for each in fields], [], [])
    tokens = sample(logits, draws).tolist()
    assert tokens[:3] == [NO_TOKEN] * 3
    assert tokens[3] >= 0


def test_a_step_without_draws_gives_none() -> None:
    assert sample(torch.zeros(0, 100), []).shape == (0,)


def test_a_token_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(IndexError):
        sample(torch.zeros(1, 10), draws_of([{"logit_bias": {10: 1.0}}], [], []))


def test_logprobs_are_those_of_the_raw_logits(rng: random.Random) -> None:
    logits = torch.randn(3, 200).bfloat16().float()
    fields: list[dict[str, object]] = [
        {"logprobs": 0, "logit_bias": {7: 100.0}},
        {},
        {"logprobs": 4, "temperature": 0.1},
    ]
    draws = draws_of(fields, [], [])
    tokens = sample(logits, draws)
    first, last = DrawLogprobs.of(logits, draws, tokens).to_wire()
    expected = logits.double().log_softmax(-1)
    assert (first[0], last[0]) == (0, 2)
    assert tokens[0] == 7
    assert list(unpack_floats(first[1].chosen)) == pytest.approx([expected[0, 7].item()], abs=1e-5)
    assert first[1].top_ids == first[1].top == b""
    best = expected[2].sort(descending=True, stable=True)
    assert list(unpack_ints(last[1].top_ids)) == best.indices[:4].tolist()
    assert list(unpack_floats(last[1].top)) == pytest.approx(best.values[:4].tolist(), abs=1e-5)


def test_a_beam_is_shown_what_its_grammar_allows_with_the_model_s_own_logprobs(
    rng: random.Random,
) -> None:
    logits, allowed = torch.randn(2, 203), sorted(rng.sample(range(203), 3))
    mask = bytearray(26)
    for token in allowed:
        mask[token >> 3] |= 1 << (token & 7)
    fields: list[dict[str, object]] = [{"beam_width": 2, "logprobs": 4}, {"logprobs": 4}]
    draws = [replace(draw, mask=bytes(mask)) for draw in draws_of(fields, [], [])]
    found = DrawLogprobs.of(logits, draws, sample(logits, draws)).to_wire()
    beam, plain = (each for _, each in found)
    expected = logits.log_softmax(-1)
    best = sorted(allowed, key=lambda token: -logits[0, token].item())
    assert unpack_ints(beam.top_ids).tolist()[:3] == best
    values = [expected[0, token].item() for token in best]
    assert unpack_floats(beam.top).tolist() == pytest.approx([*values, -math.inf])
    best_of_all = logits[1].sort(descending=True, stable=True).indices[:4]
    assert unpack_ints(plain.top_ids).tolist() == best_of_all.tolist()


def test_prompt_logprobs_do_not_depend_on_how_many_are_asked_at_once(rng: random.Random) -> None:
    logits, tokens = torch.randn(70, 9000), torch.randint(9000, (70,))
    ranked = rank(logits, tokens, 3)
    expected = logits.log_softmax(-1)
    assert torch.equal(ranked.chosen, expected.gather(-1, tokens[:, None])[:, 0])
    for row in range(0, 70, 9):
        alone = rank(logits[row : row + 1], tokens[row : row + 1], 3)
        assert torch.equal(alone.top_ids, ranked.top_ids[row : row + 1])
        assert torch.equal(alone.top, ranked.top[row : row + 1])


def test_a_gpu_ranks_no_more_at_once_than_its_memory_holds():
    with FakeTensorMode():
        many, odd, few = (torch.empty(256, size, device="cuda") for size in (262144, 151669, 1000))
    assert 8 * chunk_rows(many) * many.shape[1] == 2**27
    assert chunk_rows(odd) == 108
    assert chunk_rows(few) > len(few)
