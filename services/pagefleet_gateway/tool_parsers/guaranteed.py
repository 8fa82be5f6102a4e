"""Calls that a grammar of ours makes, whatever the model's notation (`tools`)."""

from collections.abc import Callable

from pagefleet_gateway.tool_parsers.json_call import arguments, json_calls
from pagefleet_gateway.tool_parsers.parser import MalformedError, Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import content, visible


def required(parser: ToolParser) -> Script:
    """A list of objects."""
    parser.only_calls = True
    try:
        yield from json_calls(parser, (yield from visible()))
    except MalformedError:
        parser.fail()
    yield from content(parser)


def only(name: str) -> Callable[[ToolParser], Script]:
    """The whole text is the arguments of one call."""

    def script(parser: ToolParser) -> Script:
        parser.only_calls = True
        try:
            yield from arguments(parser, name, (yield from visible()))
        except MalformedError:
            parser.fail()
        yield from content(parser)

    return script
