"""Arguments that a model writes as bare text, each made the JSON that its schema takes.

`5` is a string where the tool takes strings, and a number where it takes numbers. What can only be
a string comes out as it is written, anything else when it is complete: as the JSON or the literal
of Python's that it is, if the schema takes such a value, and as a string if it takes strings, or
the text is no value.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from pagefleet_gateway.tool_parsers.parser import MalformedError, Script, ToolParser
from pagefleet_gateway.tool_parsers.python_call import json_text, literal
from pagefleet_gateway.tool_parsers.reading import until, up_to
from pagefleet_gateway.tool_parsers.schema_types import kinds, types_of


class BareArguments:
    """Writes the arguments of a call, which begins."""

    def __init__(self, parser: ToolParser, name: str) -> None:
        parser.begin(name, "{")
        self._parser = parser
        self._schema = parser.schemas.get(name, {})
        self._keys: set[str] = set()

    def __repr__(self) -> str:
        return f"<BareArguments: {len(self._keys)}>"

    def read(self, key: str, end: str, *, on_lines: bool = False) -> Script:
        """Read the value of an argument and the tag behind it; one that comes again is passed over.

        on_lines: a line break before the value, and one behind it, are not its.
        """
        ends = ["\n" + end, end] if on_lines else [end]
        first = (yield) if on_lines else ""
        first = first.removeprefix("\n")
        if key in self._keys:
            yield from up_to(*ends, read=first)
            return
        self._parser.argue(f"{', ' if self._keys else ''}{json_text(key)}: ")
        self._keys.add(key)
        types = types_of(_properties(self._schema).get(key, {}), self._schema)
        if types == {"string"}:
            self._parser.argue('"')
            yield from until(ends, self._argue_inside, first)
            self._parser.argue('"')
        else:
            text, _ = yield from up_to(*ends, read=first)
            self._parser.argue(json_of(text, types))

    def end(self) -> None:
        """There are no more."""
        self._parser.argue("}")
        self._parser.end()

    def _argue_inside(self, text: str) -> None:
        """More of a string."""
        self._parser.argue(json_text(text)[1:-1])


def json_of(text: str, types: frozenset[str]) -> str:
    """The value that a text stands for, which should be of one of the types."""
    bare = text.strip()
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.DecodeError, RecursionError):
        try:
            value = literal(bare)
            bare = json_text(value)
        except (MalformedError, ValueError, TypeError):
            return json_text(text)
    if "string" in types and not kinds(value) & types - {"string"}:
        return json_text(text)
    return bare


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}
