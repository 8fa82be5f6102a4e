"""The page for people: what it shows is true, and it needs nobody else."""

import re

from hypothesis import given
from hypothesis import strategies as st

from pagefleet_gateway.telemetry.dashboard import PAGE, Rate, Status


def test_the_page_asks_nothing_of_other_hosts() -> None:
    page = PAGE.decode()
    assert not re.search(r"https?://|//\w|@import|url\(|src=|<link", page)
    assert re.findall(r"fetch\(\"(.*?)\"", page) == ["status"]


def test_the_page_shows_what_status_says() -> None:
    used = {name for name in Status.__struct_fields__ if re.search(rf"\b{name}\b", PAGE.decode())}
    assert used == set(Status.__struct_fields__)


@given(events=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 50)), max_size=40))
def test_rates(events: list[tuple[float, int]]) -> None:
    rate, now, happened = Rate(), 1000.0, []
    for pause, count in events:
        now += pause
        rate.add(count, now)
        happened.append((now, count))
        whole = range(int(now) - Rate.SECONDS, int(now))
        expected = sum(count for then, count in happened if int(then) in whole)
        assert rate.per_second(now) == expected / Rate.SECONDS
    assert rate.per_second(now + 60) == 0
