"""Calls of Mistral: behind a marker, as a list of objects, or since v11 a name with arguments."""

import re
from typing import Final

from pagefleet_gateway.tool_parsers.json_call import arguments, json_calls
from pagefleet_gateway.tool_parsers.parser import MalformedError, Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import marked, visible

_V11_NAME: Final = re.compile(r"([A-Za-z0-9_.-]{1,64})(\[CALL_ID\]\w+)?(\[ARGS\])?")
_LONGEST_V11_NAME: Final = 128


def mistral(parser: ToolParser) -> Script:
    """A marker, and a list of objects or a name with its arguments; anywhere in the text."""
    yield from marked(parser, ["[TOOL_CALLS]"], [], _calls)


def _calls(parser: ToolParser, _: str) -> Script:
    first = yield from visible()
    if first == "[":
        yield from json_calls(parser, first)
    else:
        yield from _named(parser, first)


def _named(parser: ToolParser, first: str) -> Script:
    """A name, what may stand behind it, and the arguments."""
    head, character = "", first
    while character != "{":
        head += character
        if len(head) > _LONGEST_V11_NAME:
            raise MalformedError("arguments follow a name")
        character = yield
    match = _V11_NAME.fullmatch(head)
    if match is None:
        raise MalformedError("a call has a name")
    yield from arguments(parser, match[1], character)
