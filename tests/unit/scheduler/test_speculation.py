"""Drafts are what followed the latest longest repetition of a sequence's end."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from pagefleet_scheduler.speculation import LONGEST_MATCH, LOOKBACK, SHORTEST_MATCH, propose


def plainly(tokens: list[int], count: int) -> list[int]:
    """The same, token by token."""
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        for at in range(len(tokens) - length - 1, -1, -1):
            if tokens[at : at + length] == tokens[-length:]:
                return [
                    tokens[at + length :][n % (len(tokens) - at - length)] for n in range(count)
                ]
    return []


@given(st.lists(st.sampled_from([0, 1, 256, 65536, 16777216, 257]), max_size=40), st.integers(1, 5))
def test_equal_to_the_plain_search(tokens: list[int], count: int) -> None:
    assert list(propose(array("i", tokens), count)) == plainly(tokens, count)


def test_what_lies_too_far_back_is_not_found() -> None:
    near, far = [
        array("i", [5, 6, *range(10, 10 + count), 5, 6]) for count in (LOOKBACK - 4, LOOKBACK)
    ]
    assert list(propose(near, 1)) == [10]
    assert not propose(far, 1)


def test_nothing_is_proposed_without_room_or_repetition() -> None:
    assert not propose(array("i", [1, 2, 3, 1, 2, 3]), 0)
    assert not propose(array("i", [1, 2, 3, 4, 5]), 3)
    assert list(propose(array("i", [1, 2, 3, 4, 1, 2]), 2)) == [3, 4]
    assert list(propose(array("i", [7, 7, 7]), 4)) == [7, 7, 7, 7]
