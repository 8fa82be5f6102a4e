from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_gateway.text.stop import StopStrings

texts = st.text(alphabet="abé😀", max_size=30)
stops = st.lists(st.text(alphabet="abé😀", min_size=1, max_size=5), max_size=4)


def by_one_character(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: stop at the first character that completes one, the longest of several."""
    for end in range(1, len(text) + 1):
        if complete := [s for s in stop if text[:end].endswith(s)]:
            match = max(complete, key=len)
            return text[: end if include else end - len(match)], match
    return text, None


@given(texts, stops, st.booleans(), st.lists(st.integers(0, 30)))
def test_the_cut_into_pieces_does_not_matter(text, stop, include, cuts):
    watcher = StopStrings(stop, include)
    released, match = "", None
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in pairwise(borders):
        piece, match = watcher.push(text[start:end])
        released += piece
        if match is not None:
            break
    else:
        released += watcher.finish()
    assert (released, match) == by_one_character(text, stop, include)


@given(texts, stops)
def test_only_what_may_become_a_stop_string_is_held(text, stop):
    watcher = StopStrings(stop)
    sent = 0
    for end, character in enumerate(text, 1):
        piece, match = watcher.push(character)
        if match is not None:
            return
        sent += len(piece)
        held = text[sent:end]
        suffixes = [text[start:end] for start in range(end)]
        longest = next((s for s in suffixes if any(t.startswith(s) for t in stop)), "")
        assert held == longest


def test_repr_tells_how_much_is_held():
    watcher = StopStrings(["</answer>"])
    assert watcher.push("42</ans").text == "42"
    assert repr(watcher) == "StopStrings(['</answer>'], 5 characters held)"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])
