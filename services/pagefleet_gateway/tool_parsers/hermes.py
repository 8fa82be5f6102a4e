"""Calls of Hermes and Qwen: objects between tags."""

from typing import Final

from pagefleet_gateway.tool_parsers.json_call import json_call
from pagefleet_gateway.tool_parsers.parser import Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import marked, visible

CALL_TAG: Final = "<tool_call>"
CALL_END_TAG: Final = "</tool_call>"


def hermes(parser: ToolParser) -> Script:
    """Calls between tags, anywhere in the text."""
    yield from marked(parser, [CALL_TAG], [CALL_END_TAG], _call)


def _call(parser: ToolParser, _: str) -> Script:
    yield from json_call(parser, (yield from visible()))
