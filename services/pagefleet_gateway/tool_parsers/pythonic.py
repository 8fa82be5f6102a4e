"""Calls of Llama 4 and ToolACE: a list of Python's calls that is the whole answer."""

from pagefleet_gateway.tool_parsers.names import checked_name
from pagefleet_gateway.tool_parsers.parser import MalformedError, Script, ToolParser
from pagefleet_gateway.tool_parsers.python_call import evaluated
from pagefleet_gateway.tool_parsers.reading import content, visible


def pythonic(parser: ToolParser) -> Script:
    """A list of Python's calls with keywords and literals; each comes out when it is complete."""
    try:
        separator = "," if (yield from visible()) == "[" else ""
        while separator == ",":
            yield from python_call(parser, (yield from visible()))
            separator = yield from visible()
        if separator == "]":
            parser.drop()
    except MalformedError:
        parser.fail()
    yield from content(parser)


def python_call(parser: ToolParser, first: str) -> Script:
    """From the name to the closing parenthesis."""
    source, character, quote, escaped, depth = first, first, "", False, 0
    while True:
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth <= 0:
                break
        elif not depth and not (character.isalnum() or character in "_."):
            raise MalformedError("a call begins with a name")
        character = yield
        source += character
    name, arguments = evaluated(source)
    parser.begin(checked_name(name), arguments)
    parser.end()
