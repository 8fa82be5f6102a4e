"""How many threads are settled on, with made-up times of steps."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from pagefleet_worker.step.team import Climb, Team

Times = Callable[[int], float]
"""Seconds of a step on so many threads."""


def settled(climb: Climb, times: Times, rng: random.Random, steps: int = 2000) -> int:
    """The number of threads of most of the last half of `steps`, whose times are noisy by 2 %."""
    used: Counter[int] = Counter()
    for step in range(steps):
        threads = climb.threads
        used[threads] += step >= steps // 2
        climb.took(times(threads) * rng.uniform(0.98, 1.02))
    assert used.most_common(1)[0][1] > 0.95 * (steps - steps // 2)
    return used.most_common(1)[0][0]


@pytest.fixture
def rng() -> random.Random:
    seed = random.getrandbits(32)
    print("seed", seed)
    return random.Random(seed)


@pytest.mark.parametrize("most", [1, 2, 3, 6, 16, 96])
def test_threads_that_gain_are_kept(most: int, rng: random.Random) -> None:
    assert settled(Climb(most), lambda threads: 1 / threads, rng) == most


@pytest.mark.parametrize("most", [2, 3, 6, 16, 96])
def test_threads_that_gain_nothing_are_left_to_others(most: int, rng: random.Random) -> None:
    assert settled(Climb(most), lambda threads: 1.0, rng) == 1
    assert settled(Climb(most), lambda threads: 1 + 0.1 * threads, rng) == 1


def test_the_best_is_found_in_the_middle(rng: random.Random) -> None:
    assert settled(Climb(64), lambda threads: 1 / min(threads, 8) + threads / 500, rng) == 8


def test_what_changes_is_followed(rng: random.Random) -> None:
    """A neighbour comes, and goes again."""
    climb = Climb(2)
    assert settled(climb, lambda threads: 1 / threads, rng) == 2
    assert settled(climb, lambda threads: float(threads), rng, 6000) == 1
    assert settled(climb, lambda threads: 1 / threads, rng, 6000) == 2


def test_trials_become_rare(rng: random.Random) -> None:
    climb, tried = Climb(2), 0
    for _ in range(100_000):
        tried += climb.threads == 1
        climb.took(0.5 if climb.threads == 2 else 1.0)
    assert 0 < tried < 0.01 * 100_000


def test_a_trial_of_fewer_threads_that_is_lost_at_once_is_one_step() -> None:
    """Each of its steps would take twice as long; of the largest, a third of a second more."""
    climb, trials = Climb(2), [0]
    for _ in range(1000):
        if climb.threads == 1:
            trials[-1] += 1
        elif trials[-1]:
            trials.append(0)
        climb.took(1 / climb.threads)
    assert len(trials) > 3
    assert set(trials[:-1]) == {1}


def test_a_single_slow_step_of_a_trial_decides_nothing() -> None:
    climb, tried = Climb(2), 0
    for _ in range(100):
        tried += climb.threads == 1
        climb.took(5.0 if climb.threads == 1 and tried == 2 else 1.0)
    assert climb.threads == 1


def test_a_single_slow_step_changes_nothing(rng: random.Random) -> None:
    climb = Climb(2)
    for step in range(5000):
        climb.took((1 / climb.threads) * (20 if step % 50 == 0 else 1))
    assert climb.threads == 2


def test_what_lost_at_small_steps_is_not_tried_at_large_ones() -> None:
    """Whether these come later, or are known already."""
    team, tried = Team(2), Counter[int]()
    for tokens in [8] * 20 + [512, 8, 8, 8, 1024, 8] * 300:
        threads = team.threads(tokens)
        tried[tokens] += threads == 1
        team.took(tokens, tokens / threads)
    assert tried[8] > 3
    assert tried[512] == tried[1024] == 0


def test_what_gains_at_small_steps_is_tried_at_large_ones_too() -> None:
    team, tried = Team(2), Counter[int]()
    for tokens in [8, 512] * 300:
        threads = team.threads(tokens)
        tried[tokens] += threads == 1
        team.took(tokens, 1.0 if tokens == 8 else tokens / threads)
    assert tried[8] > 200
    assert tried[512] > 1


def test_a_step_runs_on_as_many_threads_as_were_settled_on() -> None:
    team, before = Team(2), torch.get_num_threads()
    used = set()
    try:
        for _ in range(40):
            with team.at_work(1):
                used.add(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert used == {1, 2}
