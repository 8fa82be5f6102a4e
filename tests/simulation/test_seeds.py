"""Random scenarios: many seeds, each replayable, and a checker that can fail."""

import os
import random
import subprocess
import sys

import pytest

from tests.simulation.cell import Cell, Scenario, SimulationFailure, Wish
from tests.simulation.clients import make_submit
from tests.simulation.faults import Fail
from tests.simulation.network import Moment
from tests.simulation.scenarios import random_scenario


@pytest.mark.parametrize(
    "first",
    [0, 50, 100, *(pytest.param(first, marks=pytest.mark.slow) for first in (150, 200, 250))],
)
def test_seeds(first: int) -> None:
    for seed in range(first, first + 50):
        Cell(random_scenario(seed)).live()


@pytest.mark.slow
@pytest.mark.parametrize("_", range(10))
def test_fresh_seeds(_: int) -> None:
    first = random.randrange(1000, 2**32)
    for seed in range(first, first + 1000):
        Cell(random_scenario(seed)).live()


def test_a_seed_tells_the_same_story_whatever_the_order_of_hashes() -> None:
    stories = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulation", "358"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert stories[0].count(b"\n") > 100
    assert stories[0] == stories[1]


def one_wish(**fixed: int) -> list[Wish]:
    return [Wish(0.1, 0, make_submit("r0", "seeded", random.Random(1), **fixed))]


def test_a_wrong_token_is_found_and_the_story_told() -> None:
    """It is the last one: of an earlier one the engine would know that it never gave it."""
    lie = Fail(Moment("Outputs", 1), "worker0", "lie")
    scenario = Scenario(seed=1, workers=1, wishes=one_wish(max_tokens=3), faults=[lie])
    with pytest.raises(SimulationFailure, match=r"worker0 +lies") as failure:
        Cell(scenario).live()
    assert "choice 0 gets" in str(failure.value)
    assert "Replay it: python -m tests.simulation 1" in str(failure.value)


def test_a_cell_that_finds_no_rest_is_found() -> None:
    with pytest.raises(SimulationFailure, match="no rest: <Client r0, tokens"):
        Cell(Scenario(seed=1, workers=0, wishes=one_wish())).live()
