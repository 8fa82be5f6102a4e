"""Token buckets: what they let through is never more than a minute's worth ahead of the clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_gateway.allowance import Allowance


def test_no_limit_never_waits() -> None:
    allowance = Allowance(None)
    allowance.take(10**9, 0.0)
    assert allowance.wait(0.0) == 0


def test_a_minutes_worth_may_be_used_at_once_and_comes_back_evenly() -> None:
    allowance = Allowance(60)
    for _ in range(60):
        assert allowance.wait(0.0) == 0
        allowance.take(1, 0.0)
    assert allowance.wait(0.0) == pytest.approx(1.0)
    assert allowance.wait(0.75) == pytest.approx(0.25)
    assert allowance.wait(1.0) == pytest.approx(0.0)
    assert allowance.wait(10**6) == 0
    allowance.take(60, 10**6)
    assert allowance.wait(10**6) == pytest.approx(1.0)


def test_debt_is_waited_off() -> None:
    allowance = Allowance(600)
    allowance.take(1200, 0.0)
    assert allowance.wait(0.0) == pytest.approx(60.1)


def test_another_rate_keeps_what_was_taken() -> None:
    allowance = Allowance(60)
    allowance.take(50, 0.0)
    allowance.change(40)
    assert allowance.wait(0.0) == pytest.approx(11 * 60 / 40)
    allowance.change(None)
    assert allowance.wait(0.0) == 0
    allowance.change(60)
    assert allowance.wait(0.0) == 0


@given(
    per_minute=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 90), st.integers(1, 500)), max_size=30),
)
def test_takes_are_bounded_and_waits_are_kept(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    allowance = Allowance(per_minute)
    now = taken = 0.0
    for pause, count in steps:
        now += pause
        if wait := allowance.wait(now):
            assert allowance.wait(now + wait) == pytest.approx(0, abs=1e-6)
            now += wait + 1e-6
        before = taken
        taken += count
        allowance.take(count, now)
        assert before <= per_minute * (1 + now / 60) + 1e-3
