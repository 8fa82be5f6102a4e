"""Calls of OLMo 3: Python's, one a line, between tags."""

from pagefleet_gateway.tool_parsers.parser import Script, ToolParser
from pagefleet_gateway.tool_parsers.pythonic import python_call
from pagefleet_gateway.tool_parsers.reading import marked, visible


def olmo3(parser: ToolParser) -> Script:
    """Calls between tags, anywhere in the text; each comes out when it is complete."""
    yield from marked(parser, ["<function_calls>"], ["</function_calls>"], _calls)


def _calls(parser: ToolParser, _: str) -> Script:
    while True:
        yield from python_call(parser, (yield from visible()))
