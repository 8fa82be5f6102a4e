"""Names of tools in text."""

import re
from collections.abc import Generator
from typing import Final

from pagefleet_gateway.tool_parsers.parser import MalformedError
from pagefleet_gateway.tool_parsers.reading import until

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def checked_name(name: str) -> str:
    """A name that a tool can have.

    Raises:
        MalformedError: none can have this one.
    """
    if _NAME.fullmatch(name) is None:
        raise MalformedError("no tool has such a name")
    return name


def name_before(*markers: str, read: str = "") -> Generator[None, str, tuple[str, str]]:
    """Read a name and the marker behind it; both."""
    name = ""

    def add(text: str) -> None:
        nonlocal name
        name = checked_name(name + text)

    marker = yield from until(markers, add, read)
    return checked_name(name), marker
