"""Calls as JSON objects, each with a name and arguments."""

import json
from typing import Final

from pagefleet_gateway.tool_parsers.json_scanner import ObjectScanner, ValueScanner
from pagefleet_gateway.tool_parsers.names import checked_name
from pagefleet_gateway.tool_parsers.parser import MalformedError, Script, ToolParser
from pagefleet_gateway.tool_parsers.reading import visible

_ARGUMENTS: Final = ("arguments", "parameters")
_KEYS: Final = ("name", "id", "type", *_ARGUMENTS)


def json_calls(parser: ToolParser, first: str) -> Script:
    """A list of objects that are calls."""
    separator = "," if first == "[" else ""
    while separator == ",":
        yield from json_call(parser, (yield from visible()))
        separator = yield from visible()
    if separator != "]":
        raise MalformedError("calls are a list")
    parser.drop()


class _Call:
    """A call as an object: a name and arguments in any order; those before the name are held.

    Once it has begun, members that have no place in it, or come again, are passed over.
    """

    def __init__(self, parser: ToolParser) -> None:
        self.scanner = ObjectScanner()
        self._parser = parser
        self._raw_name = ""
        self._name: str | None = None
        self._arguments = ""
        self._argued = False
        self.begun = False

    def push(self, character: str) -> None:
        in_value, key = self.scanner.push(character), self.scanner.key
        if key is not None and key not in _KEYS and not self.begun:
            raise MalformedError("a call has a name and arguments")
        if in_value and key == "name" and self._name is None:
            self._raw_name += character
            if not self.scanner.in_value:
                self._name = _name_in(self._raw_name)
        elif in_value and key in _ARGUMENTS and not self._argued:
            self._argue(character)
            self._argued = not self.scanner.in_value
        ready = self._arguments or self.scanner.complete
        if self._name is not None and ready and not self.begun:
            self._parser.begin(self._name, self._arguments or "{}")
            self.begun = True

    def _argue(self, character: str) -> None:
        if self.begun:
            self._parser.argue(character)
        else:
            self._arguments += character


def json_call(parser: ToolParser, first: str) -> Script:
    """An object that is a call."""
    call = _Call(parser)
    call.push(first)
    while not call.scanner.complete:
        call.push((yield))
    if not call.begun:
        raise MalformedError("a call has a name")
    parser.end()


def arguments(parser: ToolParser, name: str, first: str) -> Script:
    """An object that is the arguments of a call."""
    scanner = ValueScanner()
    scanner.push(first)
    parser.begin(name, first)
    while not scanner.complete:
        character = yield
        scanner.push(character)
        parser.argue(character)
    parser.end()


def _name_in(raw: str) -> str:
    """The name that a JSON value is."""
    try:
        name = json.loads(raw)
    except ValueError as error:
        raise MalformedError("a name is a string") from error
    return checked_name(name if isinstance(name, str) else "")
