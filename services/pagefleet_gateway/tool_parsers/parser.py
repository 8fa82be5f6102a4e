"""Follows a script through one choice's text: what of it is content, and what is calls."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Script: TypeAlias = Generator[None, str, None]
"""Is sent characters until the end of the text."""


class MalformedError(ValueError):
    """Text goes on as no call does."""


@dataclass(slots=True)
class CallDelta:
    """What is new of the call of that number: its name, once, and more of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


Spoken: TypeAlias = str | CallDelta
"""Content, or a piece of a call."""


class ToolParser:
    """Reads one choice by a script of its family.

    schemas: of the arguments of each tool, for notations that do not tell strings from the rest.
    """

    def __init__(
        self,
        script: "Callable[[ToolParser], Script]",
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.schemas = schemas or {}
        self.held = ""
        """Neither content nor a call yet; within a call, what is not of its arguments."""
        self.calls = 0
        """That have begun."""
        self.only_calls = False
        """Nothing else can be written."""
        self.in_call = self._after_call = False
        self._space = ""
        self._spoken: list[Spoken] = []
        self._script = script(self)
        next(self._script)

    def __repr__(self) -> str:
        return f"<ToolParser: {self.calls} calls, {len(self.held)} characters held>"

    def push(self, text: str) -> list[Spoken]:
        """What became certain with `text`."""
        for character in text:
            self.held += character
            self._script.send(character)
        return self._taken()

    def finish(self) -> list[Spoken]:
        """The rest: what is held is no call."""
        if not (self.in_call or self.only_calls):
            self.say(self.held)
        if self._space:
            self._spoken.append(self._space)
        return self._taken()

    def say(self, text: str) -> None:
        """Text at the start of what is held is content."""
        if not text:
            return
        self.held = self.held[len(text) :]
        text = self._space + (text.lstrip() if self._after_call else text)
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._after_call = False
            if self._spoken and isinstance(self._spoken[-1], str):
                self._spoken[-1] += body
            else:
                self._spoken.append(body)

    def begin(self, name: str, arguments: str) -> None:
        """What is held is the beginning of a call."""
        if arguments[0] != "{":
            raise MalformedError("arguments are an object")
        self._spoken.append(CallDelta(self.calls, name, arguments))
        self.held = self._space = ""
        self.calls += 1
        self.in_call = True

    def argue(self, text: str) -> None:
        """More of the arguments of the call that goes on, which is all that is held."""
        self.held = ""
        last = self._spoken[-1] if self._spoken else None
        if isinstance(last, CallDelta):
            last.arguments += text
        else:
            self._spoken.append(CallDelta(self.calls - 1, arguments=text))

    def end(self) -> None:
        """The call is complete."""
        self.in_call, self._after_call, self.held = False, True, ""

    def drop(self) -> None:
        """What is held belongs to the notation."""
        self.held = ""

    def fail(self) -> None:
        """What is held is no part of a call, after all: it is to be read as any other text."""
        if self.in_call:
            self.in_call, self._after_call = False, True

    def _taken(self) -> list[Spoken]:
        spoken, self._spoken = self._spoken, []
        return spoken
