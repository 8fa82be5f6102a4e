"""Calls of DeepSeek-V3 and R1: JSON in fences, between tokens of their own."""

from typing import Final

from pagefleet_gateway.tool_parsers.json_call import arguments
from pagefleet_gateway.tool_parsers.names import name_before
from pagefleet_gateway.tool_parsers.parser import Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import expect, marked, visible

_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR = (
    f"<\N{FULLWIDTH VERTICAL LINE}tool▁{name}\N{FULLWIDTH VERTICAL LINE}>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
_FENCE: Final = "```"


def deepseek_v3(parser: ToolParser) -> Script:
    """Names with their arguments; anywhere in the text."""
    yield from marked(parser, [_CALLS_BEGIN, _CALL_BEGIN], [_CALL_END, _CALLS_END], _call)


def _call(parser: ToolParser, marker: str) -> Script:
    if marker == _CALLS_BEGIN:
        yield from expect(_CALL_BEGIN)
    yield from expect("function" + _SEPARATOR)
    name, _ = yield from name_before("\n")
    yield from expect(_FENCE + "json")
    yield from arguments(parser, name, (yield from visible()))
    yield from expect(_FENCE)
    parser.drop()
