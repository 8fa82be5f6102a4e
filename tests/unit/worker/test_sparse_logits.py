"""The plain sampler against the torch one, over the same logits written out in full."""

import random
from array import array
from math import inf

import pytest
import torch

from pagefleet.params import SamplingParams
from pagefleet.wire import unpack_floats, unpack_ints
from pagefleet_worker.sampling.draw import NO_TOKEN, Draw
from pagefleet_worker.sampling.logprobs import DrawLogprobs
from pagefleet_worker.sampling.sampler import sample
from pagefleet_worker.sampling.sparse_logits import FLOOR, SparseLogits, pack_logprobs

SIZE = 300


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def any_params(rng: random.Random, tokens: list[int]) -> SamplingParams:
    choices: dict[str, object] = {
        "temperature": rng.choice((0.0, 0.4, 1.3)),
        "top_k": rng.choice((1, 5, 40, 500)),
        "top_p": rng.choice((0.1, 0.6, 0.95)),
        "min_p": rng.choice((0.01, 0.3)),
        "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "logit_bias": {rng.randrange(SIZE): rng.uniform(-50, 50) for _ in range(3)},
        "bad_words": tuple((token,) for token in rng.sample(tokens, 3)),
        "allowed_token_ids": tuple(rng.sample(range(SIZE), 150)),
        "eos_token_ids": (tokens[0],),
        "min_tokens": 100,
    }
    wanted = rng.sample(sorted(choices), rng.randint(0, len(choices)))
    fields = {name: choices[name] for name in wanted}
    return SamplingParams(
        max_tokens=100, seed=rng.getrandbits(64), logprobs=rng.randint(0, 20), **fields
    )


def test_chooses_as_the_sampler_of_tensors(rng: random.Random) -> None:
    sparse, draws, rows = [], [], []
    for row in range(200):
        tokens = sorted(rng.sample(range(SIZE), 64))
        logits = torch.randn(64).mul(3).tolist()
        each = torch.full((SIZE,), FLOOR)
        each[tokens] = torch.tensor(logits)
        history = array("i", rng.choices(range(SIZE), k=rng.randint(1, 60)))
        prompt_length = rng.randint(0, len(history))
        position = len(history) - prompt_length
        params = any_params(rng, tokens)
        rows.append(each)
        sparse.append(SparseLogits(SIZE, tokens, logits))
        draws.append(Draw(row, params, history, prompt_length, rng.randrange(9), position))
    expected = sample(torch.stack(rows), draws)
    chosen = [logits.choose(draw) for logits, draw in zip(sparse, draws, strict=True)]
    differing = [row for row in range(200) if chosen[row] != expected[row]]
    assert len(differing) <= 1, [draws[row].params for row in differing]
    logprobs = DrawLogprobs.of(torch.stack(rows), draws, expected).to_wire()
    for row, reported in logprobs:
        count = draws[row].params.logprobs
        assert count is not None
        packed = pack_logprobs([sparse[row]], [int(expected[row])], count)
        assert unpack_ints(packed.top_ids) == unpack_ints(reported.top_ids)
        for ours, theirs in ((packed.top, reported.top), (packed.chosen, reported.chosen)):
            assert list(unpack_floats(ours)) == pytest.approx(list(unpack_floats(theirs)), abs=1e-4)


def test_the_best_tokens_go_on_with_those_at_the_floor() -> None:
    logits = SparseLogits(100, range(1, 4), [1.0, 3.0, 3.0])
    assert [token for token, _ in logits.top(6)] == [2, 3, 1, 0, 4, 5]
    assert logits.logprob(50) == logits.top(4)[3][1]


def test_a_mask_leaves_the_allowed_ones_and_shows_that_there_are_no_more() -> None:
    logits = SparseLogits(16, range(1, 4), [1.0, 3.0, 3.0])
    ranked = logits.top(6, mask=bytes([0b10001100, 0b1]))
    assert [token for token, _ in ranked] == [2, 3, 7, 8, 0, 1]
    values = [value for _, value in ranked]
    assert values[:4] == [logits.logprob(token) for token in (2, 3, 7, 8)]
    assert values[4:] == [-inf, -inf]


def test_no_token_where_the_masks_leave_none() -> None:
    params = SamplingParams(max_tokens=1, seed=0, allowed_token_ids=(5,), bad_words=((5,),))
    logits = SparseLogits(100, range(64), [0.0] * 64)
    assert logits.choose(Draw(0, params, [], 0, 0, 0)) == NO_TOKEN
