"""Steps that scripts are made of: each reads on until it knows what it was sent to find out."""

from collections.abc import Generator, Sequence

from pagefleet_gateway.tool_parsers.parser import MalformedError, Script, ToolParser


def visible() -> Generator[None, str, str]:
    """The next character that is no white space."""
    while (character := (yield)).isspace():
        pass
    return character


def content(parser: ToolParser) -> Script:
    """All that is held and follows is content."""
    while True:
        parser.say(parser.held)
        yield


def find(parser: ToolParser, markers: Sequence[str]) -> Generator[None, str, str]:
    """Let text be content until one of the markers, which begin alike; it stays held."""
    while True:
        at = parser.held.find(markers[0][0])
        while at >= 0 and not any(marker.startswith(parser.held[at:]) for marker in markers):
            at = parser.held.find(markers[0][0], at + 1)
        parser.say(parser.held if at < 0 else parser.held[:at])
        if parser.held in markers:
            return parser.held
        yield


def expect(marker: str, read: int = 0) -> Script:
    """Read a marker after white space, of which `read` characters are read."""
    for number, wanted in enumerate(marker[read:], read):
        character = (yield) if number else (yield from visible())
        if character != wanted:
            raise MalformedError(f"{marker} is missing")
