"""Calls of Phi-4-mini: a list of objects behind a name."""

from pagefleet_gateway.tool_parsers.json_call import json_calls
from pagefleet_gateway.tool_parsers.parser import Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import marked


def phi4_mini_json(parser: ToolParser) -> Script:
    """A list that `functools` stands before; anywhere in the text."""
    yield from marked(parser, ["functools["], [], _calls)


def _calls(parser: ToolParser, marker: str) -> Script:
    yield from json_calls(parser, marker[-1])
