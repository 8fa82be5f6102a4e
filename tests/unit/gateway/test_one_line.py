"""Every text's JSON is one line, and still its JSON."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_gateway.rendering.one_line import one_line

ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@given(st.text(st.one_of(st.sampled_from(ENDS), st.characters(exclude_categories=["Cs"]))))
def test_a_text_is_one_line(text: str) -> None:
    line = one_line(msgspec.json.encode([text, {text: text}]))
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == [text, {text: text}]


def test_what_has_no_such_end_is_the_same_object() -> None:
    content = msgspec.json.encode("é \n")
    assert one_line(content) is content
