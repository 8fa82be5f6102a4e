"""Beam searches find what transformers' find, with the scores that it gives them."""

from collections.abc import Callable
from itertools import cycle, product
from typing import NamedTuple

import pytest

from pagefleet.params import SamplingParams
from tests.models import VARIANTS
from tests.system.conftest import SMOLLM2, Case

PROMPTS = 8
"""Two of them are the same. Of one prompt in 150 the beams are near a tie: of more than half of
these in one run of a million.
"""
LARGE_POOL = 400


class Setting(NamedTuple):
    width: int
    length_penalty: float
    early_stopping: bool | None
    blocks: int
    lookahead: bool


SETTINGS = [
    Setting(4, 1.0, False, 21, True),
    Setting(2, 0.5, True, LARGE_POOL, False),
    Setting(3, 2.0, None, LARGE_POOL, True),
]


QUICK = set(zip(VARIANTS, cycle(SETTINGS), strict=False))
"""Each model with a setting, and each setting with some models."""


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param(*each, marks=[] if each in QUICK else pytest.mark.slow)
        for each in product([*VARIANTS, SMOLLM2], SETTINGS)
    ],
    ids=lambda value: value if isinstance(value, str) else f"width-{value.width}",
)
def test_equal_to_transformers(case: Callable[[str], Case], name: str, setting: Setting) -> None:
    model, oracle, prompts = case(name).model, case(name).oracle, case(name).prompts(PROMPTS)
    print("prompts", prompts)
    params = SamplingParams(
        max_tokens=8,
        seed=0,
        eos_token_ids=(oracle.eos,),
        beam_width=setting.width,
        length_penalty=setting.length_penalty,
        early_stopping=setting.early_stopping,
    )
    expected = oracle.certain_beams(prompts, params)
    cell = model.cell(blocks=setting.blocks, budget=64, lookahead=setting.lookahead)
    requests = [cell.submit(prompt, params, setting.width) for prompt in prompts]
    cell.run()
    cell.assert_idle()
    compared = 0
    for request, beams in zip(requests, expected, strict=True):
        if beams is None:
            continue
        compared += 1
        client = cell.clients[request]
        for choice, beam in enumerate(beams):
            assert client.tokens[choice] == beam.tokens
            assert client.scores[choice] == pytest.approx(beam.score, abs=1e-4)
    assert compared >= PROMPTS / 2
    assert (cell.planner.preemptions > 0) == (setting.blocks < LARGE_POOL)
