"""Calls of Granite 3: behind a marker, as a list of objects."""

from pagefleet_gateway.tool_parsers.json_call import json_calls
from pagefleet_gateway.tool_parsers.parser import Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import marked, visible


def granite(parser: ToolParser) -> Script:
    """A marker, by either of its spellings, and a list; anywhere in the text."""
    yield from marked(parser, ["<|tool_call|>", "<tool_call>"], [], _calls)


def _calls(parser: ToolParser, _: str) -> Script:
    yield from json_calls(parser, (yield from visible()))
