"""Drafts are what followed the latest longest repetition of a sequence's end."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_scheduler.prompt_lookup import (
    LONGEST_MATCH,
    LOOKBACK,
    NO_DRAFTS,
    NOTHING,
    Drafts,
    PromptLookup,
)


def plainly(tokens: list[int], count: int) -> tuple[list[int], int]:
    """The same, token by token, the longest match first."""
    for length in range(LONGEST_MATCH, 0, -1):
        for at in range(len(tokens) - length - 1, -1, -1):
            if tokens[at : at + length] == tokens[-length:]:
                period = tokens[at + length :]
                return [period[n % len(period)] for n in range(count)], length
    return [], 0


def propose(tokens: list[int], count: int, prediction: "array[int]" = NOTHING) -> Drafts:
    return PromptLookup(prediction).propose(array("i", tokens), count)


def proposed(tokens: list[int], count: int) -> tuple[list[int], int]:
    drafts = propose(tokens, count)
    return list(drafts.tokens), drafts.match


@given(
    st.lists(st.sampled_from([0, 1, 256, 65536, 0xD800, 0xDFFF, 0xFEFF, 0x10FFFF]), max_size=40)
    | st.lists(st.integers(0, 1), max_size=60),
    st.integers(1, 5),
)
def test_equal_to_the_plain_search(tokens: list[int], count: int) -> None:
    assert proposed(tokens, count) == plainly(tokens, count)


def test_what_lies_too_far_back_is_not_found() -> None:
    near, far = ([5, 6, *range(10, 10 + count), 5, 6] for count in (LOOKBACK - 4, LOOKBACK))
    assert proposed(near, 1) == ([10], 2)
    assert proposed(far, 1) == ([], 0)


@pytest.mark.parametrize("predicted", [0, 500])
def test_a_text_that_grows_is_as_one_that_was_there_at_once(predicted: int) -> None:
    """Beyond what is looked back to, too, with and without a prediction before it."""
    draw = random.Random(seed := random.randrange(2**32))
    prediction = array("i", draw.choices(range(30), k=predicted))
    tokens = draw.choices(range(30), k=LOOKBACK + 200)
    growing = PromptLookup(prediction)
    for length in sorted(draw.sample(range(len(tokens) + 1), k=60)):
        found = growing.propose(array("i", tokens[:length]), 3)
        assert found == propose(tokens[:length], 3, prediction), (seed, length)


def test_nothing_is_proposed_without_room_or_repetition() -> None:
    assert proposed([1, 2, 3, 1, 2, 3], 0) == ([], 0)
    assert proposed([1, 2, 3, 4, 5], 3) == ([], 0)
    assert proposed([], 3) == ([], 0)
    assert proposed([1, 2, 3, 4, 1, 2], 2) == ([3, 4], 2)
    assert proposed([7, 7, 7], 4) == ([7, 7, 7, 7], 2)


def test_what_was_predicted_counts_as_said_before() -> None:
    prediction = array("i", [1, 2, 3, 4, 5])
    assert propose([9, 8, 2, 3], 2, prediction) == Drafts(array("i", [4, 5]), 2)
    assert propose([2, 3, 6, 2, 3], 2, prediction) == Drafts(array("i", [6, 2]), 2)
    assert propose([9, 8], 2, prediction) == NO_DRAFTS


def test_a_token_that_is_no_character_hinders_nobody() -> None:
    assert proposed([0x110000, 7, 7, 7], 2) == ([], 0)


def test_a_longer_match_goes_before_a_later_one() -> None:
    assert propose([1, 2, 3, 8, 2, 3, 9, 1, 2, 3], 2) == Drafts(array("i", [8, 2]), 3)
