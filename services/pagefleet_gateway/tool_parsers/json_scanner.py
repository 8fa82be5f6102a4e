"""Follows one JSON object as its characters arrive, without understanding its values.

It knows which member's value a character belongs to and when the object is complete. Values are
only followed to their end (strings, and brackets of any kind, are counted); whether they are JSON
is for whoever reads them.
"""

import json
from typing import Final

from pagefleet_gateway.tool_parsers.parser import MalformedError

_SPACE: Final = " \t\r\n"


class ValueScanner:
    """State of the scan of one value; `complete` is its end."""

    def __init__(self) -> None:
        self.complete = False
        self._quoted = False
        self._escaped = False
        self._depth = 0

    def push(self, character: str) -> bool:
        """Take the next character; whether it is part of the value, or shows that it has ended."""
        if self._quoted:
            self._quoted = character != '"' or self._escaped
            self._escaped = character == "\\" and not self._escaped
            self.complete = not self._quoted and not self._depth
        elif character == '"':
            self._quoted, self._escaped = True, False
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            self.complete = not self._depth
        elif not self._depth and character in ",}" + _SPACE:
            self.complete = True
            return False
        return True


class ObjectScanner:
    """State of the scan: `key` is the member that was met last, `complete` the object's end."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.in_value = False
        """Whether the value of `key` goes on."""
        self.complete = False
        self._stage = self._opening
        self._string = ""
        self._escaped = False
        self._scanner = ValueScanner()

    def push(self, character: str) -> bool:
        """Take the next character; whether it is part of the value of `key`.

        Raises:
            MalformedError: no object goes on like this, or it is complete.
        """
        return self._stage(character)

    def _opening(self, character: str) -> bool:
        if character == "{":
            self._stage = self._member
        elif character not in _SPACE:
            raise MalformedError("an object begins with a brace")
        return False

    def _member(self, character: str) -> bool:
        if character == '"':
            self._string, self._escaped = character, False
            self._stage = self._key
        elif character == "}" and self.key is None:
            self._complete()
        elif character not in _SPACE:
            raise MalformedError("a member begins with its name in quotes")
        return False

    def _key(self, character: str) -> bool:
        self._string += character
        if character == '"' and not self._escaped:
            try:
                self.key = json.loads(self._string)
            except ValueError as error:
                raise MalformedError("a member's name is no string") from error
            self._stage = self._colon
        self._escaped = character == "\\" and not self._escaped
        return False

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._stage = self._before_value
        elif character not in _SPACE:
            raise MalformedError("a colon follows a member's name")
        return False

    def _before_value(self, character: str) -> bool:
        if character in _SPACE:
            return False
        if character in ",}]":
            raise MalformedError("a member lacks its value")
        self._stage, self.in_value = self._value, True
        self._scanner = ValueScanner()
        return self._value(character)

    def _value(self, character: str) -> bool:
        belongs = self._scanner.push(character)
        if self._scanner.complete:
            self._stage, self.in_value = self._after_value, False
        return belongs or self._after_value(character)

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._stage = self._member
        elif character == "}":
            self._complete()
        elif character not in _SPACE:
            raise MalformedError("a comma or a brace follows a value")
        return False

    def _complete(self) -> None:
        self.complete, self._stage = True, self._nothing

    def _nothing(self, character: str) -> bool:
        raise MalformedError("nothing follows the end of an object")
