"""Values that are bare text: whatever a model writes becomes JSON, or no call at all."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet_gateway.tool_parsers.bare_arguments import json_of
from pagefleet_gateway.tool_parsers.parser import MalformedError
from pagefleet_gateway.tool_parsers.python_call import evaluated
from pagefleet_gateway.tool_parsers.schema_types import ALL_TYPES

NO_VALUES = [
    *("NaN", "1e999x", "b'a'", "1j", "...", "f()", "x.y", "[f(1)]", "{(1, 2): 3}", "{1, 2}"),
    *("'" + r"\ud800" + "'", "9" * 5_000, "[" * 5_000, "-" * 100_000 + "1", "1+" * 20_000 + "1"),
    *("(" * 300 + ")" * 300, "x" + ".a" * 20_000, "", " "),
]
"""What neither JSON nor Python's literals are, or JSON has no word for."""


@pytest.mark.parametrize("text", NO_VALUES, ids=lambda text: text[:12])
def test_what_is_no_value_is_a_string(text: str) -> None:
    for types in (ALL_TYPES, frozenset({"array"})):
        assert json.loads(json_of(text, types).encode()) == text


@pytest.mark.parametrize("text", NO_VALUES, ids=lambda text: text[:12])
def test_a_call_with_what_is_no_value_is_none(text: str) -> None:
    if text.strip():
        with pytest.raises(MalformedError):
            evaluated(f"f(a={text})")


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"string", "integer"}, 5),
        ("5.5", {"string", "integer"}, "5.5"),
        ("5", {"string", "null"}, "5"),
        (" None\n", {"string", "null"}, None),
        ("true", {"string"}, "true"),
        ("True", {"boolean"}, True),
        ('"a"', {"string", "null"}, '"a"'),
        ('"a"', {"null"}, "a"),
        ("{'a': null}", {"object"}, {"a": None}),
        ("(1, 2)", {"array"}, [1, 2]),
        ("[1]", {"integer"}, [1]),
    ],
)
def test_a_schema_says_what_a_text_is(text: str, types: set[str], value: object) -> None:
    assert json.loads(json_of(text, frozenset(types))) == value


@given(st.text(), st.sets(st.sampled_from(sorted(ALL_TYPES)), min_size=1))
def test_any_text_is_some_json(text: str, types: set[str]) -> None:
    json.loads(json_of(text, frozenset(types)).encode())
