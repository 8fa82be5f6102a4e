"""Steps that scripts are made of: each reads on until it knows what it was sent to find out."""

from collections.abc import Callable, Generator, Sequence

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
    """Let text be content until one of the markers; it stays held."""
    first = {marker[0] for marker in markers}
    while True:
        if first.isdisjoint(parser.held):  # as most of a text is
            parser.say(parser.held)
        else:
            parser.say(parser.held[: certain(parser.held, markers)])
            if parser.held in markers:
                return parser.held
        yield


def expect(*markers: str, read: str = "") -> Generator[None, str, str]:
    """Read one of the markers after white space, of which `read` is read; which it is."""
    while read not in markers:
        read += (yield) if read else (yield from visible())
        if not any(marker.startswith(read) for marker in markers):
            raise MalformedError(f"{' or '.join(markers)} is missing")
    return read


def until(
    markers: Sequence[str], say: Callable[[str], object], read: str = ""
) -> Generator[None, str, str]:
    """Hand text on as it becomes certain, until one of the markers; which it is.

    read: what was read of the text.
    """
    while True:
        known = certain(read, markers)
        if known:
            say(read[:known])
            read = read[known:]
        if read in markers:
            return read
        read += yield


def up_to(*markers: str, read: str = "") -> Generator[None, str, tuple[str, str]]:
    """Read text and the marker behind it; both."""
    text: list[str] = []
    marker = yield from until(markers, text.append, read)
    return "".join(text), marker


def certain(text: str, markers: Sequence[str]) -> int:
    """How much of a text lies before the markers, whatever follows."""
    for at in range(max(0, len(text) - max(map(len, markers))), len(text)):
        tail = text[at:]
        for marker in markers:
            if marker.startswith(tail):
                return at
    return len(text)


def marked(
    parser: ToolParser,
    begins: Sequence[str],
    ends: Sequence[str],
    call: Callable[[ToolParser, str], Script],
) -> Script:
    """Calls anywhere in the text, behind one of `begins`, which `call` goes on from.

    Behind calls each of `ends` is once no content, whatever stands before it.
    """
    left: list[str] = []
    while True:
        marker = yield from find(parser, [*begins, *left])
        if marker in left:
            left.remove(marker)
            parser.drop()
            continue
        calls = parser.calls
        try:
            yield from call(parser, marker)
        except MalformedError:
            parser.fail()
        left = list(ends) if parser.calls > calls else []
