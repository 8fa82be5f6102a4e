"""Calls of Qwen3-Coder: arguments in tags, as bare text."""

from typing import Final

from pagefleet_gateway.tool_parsers.bare_arguments import BareArguments
from pagefleet_gateway.tool_parsers.names import name_before
from pagefleet_gateway.tool_parsers.parser import Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import expect, marked, up_to

_CALL: Final = "<tool_call>"
_CALL_END: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"


def qwen3_coder(parser: ToolParser) -> Script:
    """Calls between tags, of which the first is sometimes forgotten; anywhere in the text."""
    yield from marked(parser, [_CALL, _FUNCTION], [_CALL_END], _call)


def _call(parser: ToolParser, marker: str) -> Script:
    if marker == _CALL:
        yield from expect(_FUNCTION)
    name, _ = yield from name_before(">")
    tag = yield from expect(_PARAMETER, _FUNCTION_END)
    arguments = BareArguments(parser, name)
    while tag == _PARAMETER:
        key, _ = yield from up_to(">")
        yield from arguments.read(key, _PARAMETER_END, on_lines=True)
        _, tag = yield from up_to(_PARAMETER, _FUNCTION_END)
    arguments.end()
