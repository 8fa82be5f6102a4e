"""When the next step is ordered."""

import pytest

from pagefleet.wire import Plan, pack_ints
from pagefleet_scheduler.flights import Flight
from pagefleet_scheduler.pace import EARLY, EARLY_AT_LEAST, Pace


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
