"""Calls of GLM-4.5 and later: names and values of arguments in tags, as bare text."""

from typing import Final

from pagefleet_gateway.tool_parsers.bare_arguments import BareArguments
from pagefleet_gateway.tool_parsers.names import name_before
from pagefleet_gateway.tool_parsers.parser import Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import expect, marked, up_to, visible

_CALL: Final = "<tool_call>"
_CALL_END: Final = "</tool_call>"
_KEY: Final = "<arg_key>"
_KEY_END: Final = "</arg_key>"
_VALUE: Final = "<arg_value>"
_VALUE_END: Final = "</arg_value>"


def glm45(parser: ToolParser) -> Script:
    """Calls between tags, anywhere in the text; since GLM-4.7 no line ends behind the name."""
    yield from marked(parser, [_CALL], [], _call)


def _call(parser: ToolParser, _: str) -> Script:
    first = yield from visible()
    name, tag = yield from name_before("\n", _KEY, _CALL_END, read=first)
    if tag == "\n":
        tag = yield from expect(_KEY, _CALL_END)
    arguments = BareArguments(parser, name)
    while tag == _KEY:
        key, _ = yield from up_to(_KEY_END)
        yield from up_to(_VALUE)
        yield from arguments.read(key.strip(), _VALUE_END)
        _, tag = yield from up_to(_KEY, _CALL_END)
    arguments.end()
