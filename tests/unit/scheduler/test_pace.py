"""When the next step is ordered, and how long one takes."""

import pytest

from pagefleet.wire import Plan, pack_ints
from pagefleet_scheduler.flights import Flight, PlannedRow
from pagefleet_scheduler.pace import (
    _FRESH,
    _REMEMBERED_PROMPTS,
    EARLY,
    EARLY_AT_LEAST,
    LEAST_OF_PROMPTS,
    PROMPT_SECONDS,
    Pace,
)
from pagefleet_scheduler.prompt_lookup import NO_DRAFTS


def flight(sent: float, tokens: int = 8) -> Flight:
    return Flight(Plan(1, 0, b"", pack_ints([0] * tokens)), [], sent)


def computed(*seconds: float, tokens: int = 8) -> Pace:
    """A pace after steps that took so long, one after another, from 0 on."""
    pace, now = Pace(), 0.0
    for each in seconds:
        now += each
        pace.landed(flight(now - each, tokens), now)
    return pace


def test_what_is_not_known_is_ordered_at_once() -> None:
    assert Pace().due(flight(5.0)) <= 5.0
    assert computed(0.1, tokens=8).due(flight(5.0, tokens=16)) <= 5.0


def test_a_known_step_is_nearly_over_first() -> None:
    pace = computed(0.1, 0.1)
    assert pace.due(flight(0.2)) == pytest.approx(0.2 + 0.1 * (1 - EARLY))
    assert pace.due(flight(5.0)) == pytest.approx(5.0 + 0.1 * (1 - EARLY))


def test_a_step_begins_when_the_one_before_is_done() -> None:
    """It was ordered at 0.05, but the worker computed another until 0.2."""
    pace = computed(0.1, 0.1)
    assert pace.due(flight(0.05)) == pytest.approx(0.2 + 0.1 * (1 - EARLY))
    pace.landed(flight(0.05), 0.26)
    assert pace.due(flight(0.05)) == pytest.approx(0.26 + 0.06 * (1 - EARLY))


def test_short_steps_are_ordered_at_once() -> None:
    assert computed(EARLY_AT_LEAST).due(flight(1.0)) <= 1.0


def test_one_slow_step_keeps_nobody_waiting() -> None:
    assert computed(0.02, 3.0, 0.02).due(flight(9.0)) < 9.02


def test_how_much_of_a_prompt_is_computed_in_a_time() -> None:
    """By the latest steps; one that took very long tells as little as two that came together."""
    assert Pace().most_of_prompts(9999, False) == LEAST_OF_PROMPTS
    assert computed(0.0, 0.0).most_of_prompts(9999, False) == 9999
    pace = computed(0.125, 30.0, 0.125, 0.0, 0.125, tokens=100)
    assert pace.most_of_prompts(9999, False) == 800 * PROMPT_SECONDS
    now = 40.0
    for _ in range(_REMEMBERED_PROMPTS):
        now += 0.5
        pace.landed(flight(now - 0.5, 100), now)
    assert pace.most_of_prompts(9999, False) == 200 * PROMPT_SECONDS


def test_steps_that_sample_behind_every_token_tell_nothing_of_prompts() -> None:
    row = PlannedRow(None, 0, 0, 8, False, NO_DRAFTS)  # type: ignore[arg-type]
    pace = computed(0.0625)
    for _ in range(_REMEMBERED_PROMPTS):
        pace.landed(Flight(flight(5.0).plan, [row], 5.0), 6.0)
    assert pace.most_of_prompts(9999, False) == 128 * PROMPT_SECONDS


def test_what_became_slower_is_noticed() -> None:
    assert computed(0.02, *[0.2] * 4).due(flight(9.0)) == pytest.approx(9.0 + 0.2 * (1 - EARLY))


def test_a_step_that_was_ordered_twice_teaches_nothing() -> None:
    pace, twice = computed(0.1), flight(0.1)
    twice.repeated = True
    pace.landed(twice, 0.101)
    assert pace.due(flight(1.0)) == pytest.approx(1.0 + 0.1 * (1 - EARLY))


def test_time_in_which_nothing_could_be_heard_does_not_count() -> None:
    pace = computed(0.1)
    pace.excuse(10.0)
    assert pace.due(flight(0.1)) == pytest.approx(10.1 + 0.1 * (1 - EARLY))


def sampled(sent: float, tokens: int) -> Flight:
    """A step with a sample behind each of its tokens."""
    row = PlannedRow(None, 0, 0, tokens, ahead=False, drafts=NO_DRAFTS)  # type: ignore[arg-type]
    return Flight(Plan(1, 0, b"", pack_ints([0] * tokens)), [row], sent)


def after(*steps: tuple[int, float]) -> Pace:
    """A pace after steps of so many tokens, all sampled, that took so long."""
    pace, now = Pace(), 0.0
    for tokens, seconds in steps:
        now += seconds
        pace.landed(sampled(now - seconds, tokens), now)
    return pace


def test_between_two_sizes_a_step_is_told_from_both() -> None:
    pace = after((8, 0.1), (24, 0.3), (24, 0.4))
    assert [pace.seconds(tokens) for tokens in (8, 12, 16, 24)] == pytest.approx(
        [0.1, 0.15, 0.2, 0.3]
    )
    assert pace.seconds(2) == pytest.approx(0.1)


def test_beyond_the_largest_a_step_takes_longer_in_proportion() -> None:
    assert Pace().seconds(3) == 0
    assert after((8, 0.1)).seconds(32) == pytest.approx(0.4)


def test_prompts_tell_only_of_sizes_that_nothing_was_sampled_in() -> None:
    pace = after((8, 0.1))
    pace.landed(flight(10.0, tokens=16), 10.2)
    assert pace.seconds(16) == pytest.approx(0.2)
    pace.landed(sampled(20.0, 24), 20.8)
    assert pace.seconds(16) == pytest.approx(0.45)


def test_what_was_learnt_long_ago_is_asked_only_if_nothing_newer_is_known() -> None:
    pace = after((8, 0.1), (16, 9.0), (32, 0.3), *[(8, 0.1)] * (_FRESH + 1))
    assert pace.seconds(16) == pytest.approx(9.0), "nothing else is so large"
    pace.landed(sampled(1000.0, 32), 1000.3)
    assert pace.seconds(16) == pytest.approx(0.1 + 0.2 / 3)
