"""Calls of gpt-oss, as `text.harmony` hands them on."""

from typing import Final

from pagefleet_gateway.tool_parsers.json_call import arguments
from pagefleet_gateway.tool_parsers.names import name_before
from pagefleet_gateway.tool_parsers.parser import Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import marked, visible

CALL_BEGIN: Final = "<|channel|>commentary to=functions."
CALL_END: Final = "<|call|>"


def openai(parser: ToolParser) -> Script:
    """Messages to functions, anywhere in the text."""
    yield from marked(parser, [CALL_BEGIN], [CALL_END], _call)


def _call(parser: ToolParser, _: str) -> Script:
    name, _ = yield from name_before("<|message|>")
    yield from arguments(parser, name, (yield from visible()))
