"""Calls of Hermes and Qwen: objects between tags, anywhere in the text."""

from typing import Final

from pagefleet_gateway.tool_parsers.json_call import json_call
from pagefleet_gateway.tool_parsers.parser import MalformedError, Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import expect, find, visible

CALL_TAG: Final = "<tool_call>"
CALL_END_TAG: Final = "</tool_call>"


def hermes(parser: ToolParser) -> Script:
    """Calls between tags, anywhere in the text; one that ends wrongly has an end tag to come."""
    tags = [CALL_TAG]
    while True:
        tag, tags = (yield from find(parser, tags)), [CALL_TAG]
        if tag == CALL_END_TAG:
            parser.drop()
            continue
        calls = parser.calls
        try:
            yield from json_call(parser, (yield from visible()))
            yield from expect(CALL_END_TAG)
            parser.drop()
        except MalformedError:
            parser.fail()
            if parser.calls > calls:
                tags.append(CALL_END_TAG)
