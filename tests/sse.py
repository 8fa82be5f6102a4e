"""Lines of a stream as server-sent events end them."""

from collections.abc import Iterator

import httpx


def lines(response: httpx.Response) -> Iterator[str]:
    """Not cut at what else `str.splitlines`, and so httpx, takes for an end: a text may hold U+0085
    or U+2028. What a broken connection left of a line is dropped.
    """
    rest = b""
    for piece in response.iter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in whole)
