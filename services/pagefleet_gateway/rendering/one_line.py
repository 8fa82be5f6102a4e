"""JSON as one line, for whoever cuts a stream of events into lines.

JSON has no line feeds, but its strings may hold U+0085, U+2028 and U+2029 as they are, at which
`str.splitlines` ends a line, and with it readers of streams such as httpx's and requests'.
"""

_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029"]


def one_line(content: bytes) -> bytes:
    """The same JSON, of which nobody ends a line."""
    if content.isascii():
        return content
    for end, escape in _ENDS:
        if end in content:
            content = content.replace(end, escape)
    return content
