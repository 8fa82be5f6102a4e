"""Calls of Llama 3: objects that are the whole answer."""

from pagefleet_gateway.tool_parsers.json_call import json_call
from pagefleet_gateway.tool_parsers.parser import MalformedError, Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import content, expect, visible


def llama3_json(parser: ToolParser) -> Script:
    """Objects, with semicolons between them; anything else is content."""
    try:
        first = yield from visible()
        if first == "<":
            yield from expect("<|python_tag|>", read=first)
            first = yield from visible()
        while True:
            yield from json_call(parser, first)
            if (yield from visible()) != ";":
                break
            first = yield from visible()
    except MalformedError:
        parser.fail()
    yield from content(parser)
