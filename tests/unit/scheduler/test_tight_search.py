"""Beam searches in a pool that holds one of them and little more."""

import random

import pytest

from pagefleet.params import SamplingParams
from tests.echo_cell import EchoCell

SEARCHES = 60


@pytest.mark.parametrize("caching", [True, False])
def test_every_search_that_is_taken_ends(caching: bool) -> None:
    params = SamplingParams(max_tokens=8, seed=0, beam_width=4, eos_token_ids=(3,))
    for seed in range(SEARCHES):
        draw = random.Random(seed)
        cell = EchoCell(blocks=11, slots=64, budget=64, block_size=16, caching=caching)
        cell.join()
        for length in [60, *(draw.randint(1, 60) for _ in range(4))]:
            cell.submit([draw.randrange(200) for _ in range(length)], params, params.beam_width)
        cell.run(2000)
        cell.assert_idle()
