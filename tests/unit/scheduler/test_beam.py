"""Beam search takes the steps that transformers' generate takes: equal answers, equal scores."""

import random
from array import array
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagefleet.params import SamplingParams
from pagefleet.wire import Finish, Logprobs, pack_floats, pack_ints
from pagefleet_scheduler.beam import BeamSearch

VOCABULARY = 40
FILL = VOCABULARY - 1
SEED = random.randrange(2**31)
"""Of the model's weights."""
ROUNDING, DISTURBED = 1e-5, 16


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=1.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=FILL,
    )
    return LlamaForCausalLM(config).eval()


Allowed = Callable[[list[int]], list[int]]
"""The tokens that a grammar lets follow prompt and outputs."""


@torch.inference_mode()
def next_tokens(
    model: LlamaForCausalLM, tokens: list[int], count: int, allowed: Allowed
) -> Logprobs:
    logprobs = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
    forbidden = torch.full_like(logprobs, -torch.inf)
    forbidden[allowed(tokens)] = 0.0
    top = (logprobs + forbidden).topk(count)
    values = top.values.tolist()
    return Logprobs(pack_floats(values[:1]), pack_ints(top.indices.tolist()), pack_floats(values))


def search(
    model: LlamaForCausalLM, prompt: list[int], params: SamplingParams, allowed: Allowed
) -> list[tuple[list[int], float, Finish]]:
    """Drive a search as the scheduler does, one model call a beam and step."""
    beams: list[list[int]] = [[]]
    state = BeamSearch(params)
    while beams:
        going = state.advance(
            [array("i", beam) for beam in beams],
            [[] for _ in beams],
            [next_tokens(model, prompt + beam, params.candidates, allowed) for beam in beams],
        )
        assert len(going) in (0, params.beam_width)
        beams = [[*beams[each.beam], each.token] for each in going]
    return [(list(answer.tokens), answer.score, answer.finish) for answer in state.answers]


def generated(
    model: LlamaForCausalLM,
    prompts: list[list[int]],
    params: SamplingParams,
    allowed: Allowed,
    noise: float = 0.0,
) -> list[list[tuple[list[int], float]]]:
    """Tokens and scores of the answers of transformers to each prompt, with noise in logprobs."""
    width, length = params.beam_width, len(prompts[0])
    found = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), length, dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=params.max_tokens,
        do_sample=False,
        eos_token_id=list(params.eos_token_ids),
        pad_token_id=FILL,
        length_penalty=params.length_penalty,
        early_stopping="never" if params.early_stopping is None else params.early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
        prefix_allowed_tokens_fn=lambda _, tokens: allowed(tokens.tolist()),
        logits_processor=[lambda _, scores: scores + noise * torch.randn_like(scores)],
    )
    tokens = [sequence[length:] for sequence in found.sequences.tolist()]
    answers = list(zip(tokens, found.sequences_scores.tolist(), strict=True))
    return [answers[first : first + width] for first in range(0, len(answers), width)]


def is_certain(
    model: LlamaForCausalLM, prompt: list[int], params: SamplingParams, allowed: Allowed
) -> bool:
    """Whether no tie is so near that rounding may break it; noise finds one by even chances."""
    searches = generated(model, [prompt] * DISTURBED, params, allowed, ROUNDING)
    return len({tuple(sorted(tuple(tokens) for tokens, _ in found)) for found in searches}) == 1


def everything(tokens: list[int]) -> list[int]:
    return [*range(VOCABULARY)]


def two_of_three(tokens: list[int]) -> list[int]:
    return [token for token in range(VOCABULARY) if (token + tokens[-1]) % 3]


@pytest.mark.parametrize("early_stopping", [True, False, None])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("allowed", [everything, two_of_three], ids=lambda each: each.__name__)
def test_equal_to_transformers(
    model: LlamaForCausalLM,
    width: int,
    length_penalty: float,
    early_stopping: bool | None,
    allowed: Allowed,
) -> None:
    ends = tuple(random.sample(range(FILL), random.randint(1, 3)))
    params = SamplingParams(
        max_tokens=12,
        seed=0,
        eos_token_ids=ends,
        beam_width=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    prompts = iter(lambda: [random.randrange(VOCABULARY) for _ in range(5)], None)
    prompt = next(each for each in prompts if is_certain(model, each, params, allowed))
    print("seed", SEED, "prompt", prompt, "ends", ends)
    answers = search(model, prompt, params, allowed)
    (left,) = generated(model, [prompt], params, allowed)
    assert len(answers) == len(left)
    for (tokens, score, finish), (_, wanted) in zip(answers, list(left), strict=True):
        assert score == pytest.approx(wanted, rel=1e-4, abs=1e-4)
        # Answers whose scores are equal, but for rounding, may come in either order.
        (same,) = (
            each
            for each in left
            if each[0][: len(tokens)] == tokens and set(each[0][len(tokens) :]) <= {FILL}
        )
        left.remove(same)
        assert score == pytest.approx(same[1], rel=1e-4, abs=1e-4)
        assert (finish == Finish.STOP) == (tokens[-1] in ends)


def test_logprobs_of_an_answer_are_its_own(model: LlamaForCausalLM) -> None:
    params = SamplingParams(max_tokens=1, seed=0, beam_width=3, logprobs=2)
    state = BeamSearch(params)
    candidates = next_tokens(model, [1, 2, 3], params.candidates, everything)
    assert state.advance([array("i")], [[]], [candidates]) == []
    for answer in state.answers:
        (piece,) = answer.logprobs
        assert answer.score == pytest.approx(memoryview(piece.chosen).cast("f")[0])
        assert piece.top_ids == candidates.top_ids[:8]
        assert piece.top == candidates.top[:8]


def test_a_beam_that_can_only_draw_level_goes_on_no_longer() -> None:
    params = SamplingParams(
        max_tokens=9, seed=0, eos_token_ids=(3,), beam_width=1, length_penalty=0.0,
        early_stopping=False,
    )  # fmt: skip
    for other, done in ((-1.0, True), (-0.5, False)):
        ranked = sorted([(-1.0, 3), (other, 4)], key=lambda each: -each[0])
        ids = pack_ints([token for _, token in ranked])
        values = pack_floats([value for value, _ in ranked])
        state = BeamSearch(params)
        going = state.advance([array("i")], [[]], [Logprobs(values[:4], ids, values)])
        assert bool(going) is not done


def test_beams_go_on_only_with_what_a_grammar_allows(model: LlamaForCausalLM) -> None:
    def one_way(tokens: list[int]) -> list[int]:
        return [5] if len(tokens) < 4 else [6, 7]

    params = SamplingParams(max_tokens=3, seed=0, beam_width=4)
    beams: list[list[int]] = [[]]
    state = BeamSearch(params)
    sizes = []
    while beams:
        found = [next_tokens(model, [1, 2, *beam], params.candidates, one_way) for beam in beams]
        going = state.advance([array("i", beam) for beam in beams], [[] for _ in beams], found)
        beams = [[*beams[each.beam], each.token] for each in going]
        sizes.append(len(beams))
    assert sizes == [1, 1, 0]
    assert sorted(list(answer.tokens) for answer in state.answers) == [[5, 5, 6], [5, 5, 7]]
