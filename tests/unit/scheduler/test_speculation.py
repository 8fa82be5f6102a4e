"""How many drafts are fed, for workers that take a known time for a step."""

from array import array
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagefleet.params import SamplingParams
from pagefleet_scheduler.prompt_lookup import LONGEST_MATCH, Drafts
from pagefleet_scheduler.sequence import Request, Sequence
from pagefleet_scheduler.speculation import KEPT, LONGER, NO_DRAFTS_PAY, PAUSE, Speculation


class Steps:
    """The pace of a worker that reads its weights in `fixed` seconds and takes `each` for a row."""

    def __init__(self, fixed: float, each: float) -> None:
        self.fixed, self.each = fixed, each

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.each * tokens


FEW_ROWS_WAIT = Steps(0.01, 0.0005)


def speculation(pace: Steps = FEW_ROWS_WAIT, most: int = 15) -> Speculation:
    return Speculation(most, pace)  # type: ignore[arg-type]


def sequence(tokens: list[int], *, ahead: int = 0) -> Sequence:
    """One that has `ahead` tokens under way, and everything but the last one computed."""
    params = SamplingParams(max_tokens=1000, seed=1)
    request = Request("r", 0, b"g", array("i", tokens), params, b"", (0, 0.0, 0), 0.0)
    made = Sequence(request, [0], array("i", tokens), ahead=ahead)
    made.ordered = made.computed = made.length - 1
    return made


LOOP = [1, 2, 3] * 8


def test_a_price_is_what_a_row_more_takes_in_tokens() -> None:
    each = speculation(Steps(0.0, 0.001))
    assert [each.price(rows) for rows in (1, 40)] == pytest.approx([1, 1])
    free = speculation(Steps(0.01, 0.0))
    assert [free.price(rows) for rows in (1, 40)] == [0, 0]
    mixed = speculation(Steps(0.01, 0.001))
    assert [mixed.price(rows) for rows in (1, 10, 40)] == pytest.approx([1 / 11, 0.5, 0.8])


def test_a_price_is_not_told_from_the_next_size_alone() -> None:
    class Noisy(Steps):
        def seconds(self, tokens: int) -> float:
            return 0.02 if tokens == 2 else super().seconds(tokens)

    assert speculation(Noisy(0.01, 0.0)).price(1) == 0
    assert speculation(Steps(0.01, -0.0001)).price(1) == 0, "larger steps are never faster"


def test_what_was_predicted_is_drafted() -> None:
    asked = sequence([1, 2, 3])
    asked.request.prediction = array("i", [2, 3, 4, 5])
    assert list(speculation().drafts(asked, 2, 0.0).tokens) == [4, 5]


def test_without_drafts_none_pays() -> None:
    off = speculation(most=0)
    assert off.price(1) == NO_DRAFTS_PAY
    assert not off.drafts(sequence(LOOP), 15, 0.0).tokens
    assert not off.pays_to_wait([sequence(LOOP, ahead=1)])


@example(price=0.1, room=10, match=4)  # ten of them make a step exactly twice as long
@given(st.floats(0, 1), st.integers(0, 20), st.integers(1, LONGEST_MATCH))
def test_as_many_as_give_most_tokens_in_their_time(price: float, room: int, match: int) -> None:
    """No other number of them would, as far as the step may become longer."""
    tokens = [7, *range(100, 100 + match), *range(200, 230), *range(100, 100 + match)]
    found = speculation().drafts(sequence(tokens), room, price).tokens
    likely = [1.0, *accumulate((KEPT + KEPT[-1:] * 15)[match - 1 :][: min(room, 15)], mul)]
    speed = [
        sum(likely[: count + 1]) / (1 + count * price)
        for count in range(len(likely))
        if 1 + count * price <= LONGER
    ]
    assert list(found) == tokens[match + 1 :][: len(found)]
    if price >= max(KEPT):
        assert not found
    else:
        assert speed[len(found)] == pytest.approx(max(speed))


def test_no_more_than_there_is_room_for() -> None:
    free = speculation(Steps(0.01, 0.0))
    assert len(free.drafts(sequence(LOOP), 3, 0.0).tokens) == 3
    assert len(free.drafts(sequence(LOOP), 100, 0.0).tokens) == 15
    ending = sequence(LOOP)
    ending.allow(3)
    assert len(free.drafts(ending, 100, 0.0).tokens) == 2


def test_what_is_never_kept_is_given_up_where_it_costs_much() -> None:
    learning, price = speculation(), 0.4
    for _ in range(300):
        drafts = learning.drafts(sequence(LOOP), 15, price)
        if drafts.tokens:
            learning.judge(drafts, 0)
    assert 0 < learning.drafted < 300 * 15
    assert learning.kept == 0
    assert not learning.drafts(sequence(LOOP), 15, price).tokens
    assert learning.drafts(sequence(LOOP), 15, 0.0).tokens


def test_what_is_always_kept_is_fed_in_larger_numbers() -> None:
    learning, price = speculation(), 0.05
    before = len(learning.drafts(sequence([1, 9, 8, 1]), 15, price).tokens)
    for _ in range(300):
        learning.judge(Drafts(array("i", range(15)), 1), 15)
    assert learning.kept == learning.drafted
    assert len(learning.drafts(sequence([1, 9, 8, 1]), 15, price).tokens) > before


def test_only_the_first_wrong_draft_is_judged() -> None:
    """Those behind it were fed behind another token than the sequence has."""
    together, apart = speculation(), speculation()
    for _ in range(300):
        together.judge(Drafts(array("i", [1, 2, 3, 4]), 2), 1)
        for match, kept in ((2, 1), (3, 0)):
            apart.judge(Drafts(array("i", [1]), match), kept)
        for price in (0.01, 0.3):
            for length in range(4, 12):
                looping = sequence(LOOP[:length])
                assert together.drafts(looping, 15, price) == apart.drafts(looping, 15, price)


def test_a_step_waits_only_for_likely_drafts_that_outweigh_the_pause() -> None:
    waits = speculation().pays_to_wait
    assert waits([sequence(LOOP, ahead=1)])
    assert not waits([sequence(list(range(20)), ahead=1)])
    assert not waits([sequence(LOOP)]), "its next token is known"
    short = PAUSE / 30
    assert not speculation(Steps(short, 0.0)).pays_to_wait([sequence(LOOP, ahead=1)])
    assert not speculation(Steps(0.0, 0.01)).pays_to_wait([sequence(LOOP, ahead=1)])


def test_the_next_token_makes_the_match_longer() -> None:
    """Behind one equal token a draft hardly outweighs the pause, behind two it does."""
    assert speculation(Steps(PAUSE * 5, 0.0)).pays_to_wait([sequence([1, 9, 8, 1], ahead=1)])


def test_nobody_waits_for_drafts_that_could_not_come() -> None:
    ending = sequence(LOOP, ahead=1)
    ending.allow(3)
    assert speculation().pays_to_wait([ending])
    ending.allow(2)
    assert not speculation().pays_to_wait([ending])


def test_who_has_nothing_to_be_fed_does_not_count() -> None:
    paused = [sequence(list(range(20))) for _ in range(100)]
    for each in paused:
        each.allow(0)
    assert speculation().pays_to_wait([sequence(LOOP, ahead=1), *paused])


def test_nobody_waits_for_drafts_where_a_prompt_is_to_be_computed() -> None:
    prompt = sequence(list(range(20)))
    prompt.ordered = prompt.computed = 0
    assert not speculation().pays_to_wait([sequence(LOOP, ahead=1), prompt])


def test_one_that_repeats_itself_does_not_hold_up_a_hundred() -> None:
    others = [sequence(list(range(20)), ahead=1) for _ in range(100)]
    assert not speculation().pays_to_wait([sequence(LOOP, ahead=1), *others])
