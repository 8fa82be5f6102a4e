"""Calls of tools in a model's text, in each family's notation, as the text arrives.

A notation is a script: a generator that is sent one character after another, so that what it makes
of a text does not depend on the pieces in which it came. What a script has read and not yet decided
on is held. It becomes content as soon as it can be no call: a text that only looks like one is
never lost. A call begins when its name is known and its arguments have begun; from then on they
come out as they are written, without being understood: whether they are JSON is for the client to
see. They end where their brackets close; what follows and is no part of the notation is content.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere (Hermes, Qwen)
    llama3_json   {"name": ..., "parameters": {...}}; {...} and nothing else (Llama 3)
    mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], since v11 name[ARGS]{...}
    pythonic      [name(key="value"), ...] and nothing else (Llama 4, ToolACE)

White space beside a call is no content; nor is, where nothing but calls can be written, the
beginning of one whose answer was cut before its arguments.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pagefleet_gateway.json_scanner import MalformedError, ObjectScanner, ValueScanner
from pagefleet_gateway.python_call import evaluated

Script: TypeAlias = Generator[None, str, None]
"""Is sent characters until the end of the text."""

CALL_TAG: Final = "<tool_call>"
CALL_END_TAG: Final = "</tool_call>"

_ARGUMENTS: Final = ("arguments", "parameters")
_KEYS: Final = ("name", "id", "type", *_ARGUMENTS)
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_V11_NAME: Final = re.compile(r"([A-Za-z0-9_.-]{1,64})(\[CALL_ID\]\w+)?(\[ARGS\])?")
_LONGEST_V11_NAME: Final = 128


@dataclass(slots=True)
class CallDelta:
    """What is new of the call of that number: its name, once, and more of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


Spoken: TypeAlias = str | CallDelta
"""Content, or a piece of a call."""


class ToolParser:
    """Reads one choice by a script of its family."""

    def __init__(self, script: "Callable[[ToolParser], Script]") -> None:
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


def hermes(parser: ToolParser) -> Script:
    """Calls between tags, anywhere in the text; one that ends wrongly has an end tag to come."""
    tags = [CALL_TAG]
    while True:
        tag, tags = (yield from _find(parser, tags)), [CALL_TAG]
        if tag == CALL_END_TAG:
            parser.drop()
            continue
        calls = parser.calls
        try:
            yield from _call(parser, (yield from _next(parser)))
            yield from _expect(parser, CALL_END_TAG)
            parser.drop()
        except MalformedError:
            parser.fail()
            if parser.calls > calls:
                tags.append(CALL_END_TAG)


def llama3_json(parser: ToolParser) -> Script:
    """Objects, with semicolons between them; anything else is content."""
    try:
        first = yield from _next(parser)
        if first == "<":
            yield from _expect(parser, "<|python_tag|>", read=1)
            first = yield from _next(parser)
        while True:
            yield from _call(parser, first)
            if (yield from _next(parser)) != ";":
                break
            first = yield from _next(parser)
    except MalformedError:
        parser.fail()
    yield from _text(parser)


def mistral(parser: ToolParser) -> Script:
    """A marker, and a list of objects or a name with its arguments."""
    while True:
        yield from _find(parser, ["[TOOL_CALLS]"])
        try:
            first = yield from _next(parser)
            if first == "[":
                yield from _list(parser)
            else:
                yield from _named(parser, first)
        except MalformedError:
            parser.fail()


def required(parser: ToolParser) -> Script:
    """The list that a grammar of ours makes (`tools`)."""
    parser.only_calls = True
    try:
        if (yield from _next(parser)) == "[":
            yield from _list(parser)
    except MalformedError:
        parser.fail()
    yield from _text(parser)


def only(name: str) -> Callable[[ToolParser], Script]:
    """The whole text is the arguments of one call."""

    def script(parser: ToolParser) -> Script:
        parser.only_calls = True
        try:
            yield from _arguments(parser, name, (yield from _next(parser)))
        except MalformedError:
            parser.fail()
        yield from _text(parser)

    return script


def pythonic(parser: ToolParser) -> Script:
    """A list of Python's calls with keywords and literals; each comes out when it is complete."""
    try:
        separator = "," if (yield from _next(parser)) == "[" else ""
        while separator == ",":
            yield from _python_call(parser, (yield from _next(parser)))
            separator = yield from _next(parser)
        if separator == "]":
            parser.drop()
    except MalformedError:
        parser.fail()
    yield from _text(parser)


PARSERS: Final[dict[str, Callable[[ToolParser], Script]]] = {
    "hermes": hermes,
    "qwen": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "pythonic": pythonic,
}
"""By the name that `--tool-call-parser` has for it."""

TAGGED: Final = frozenset({"hermes", "qwen"})
"""Parsers of calls between tags."""

SPECIAL_MARKERS: Final = frozenset({"llama3_json", "mistral"})
"""Parsers whose markers are special tokens, which must be part of the text."""


def _next(parser: ToolParser) -> Generator[None, str, str]:
    """The next character that is no white space."""
    while (character := (yield)).isspace():
        pass
    return character


def _text(parser: ToolParser) -> Script:
    """All that is held and follows is content."""
    while True:
        parser.say(parser.held)
        yield


def _find(parser: ToolParser, markers: Sequence[str]) -> Generator[None, str, str]:
    """Let text be content until one of the markers, which begin alike; it stays held."""
    while True:
        at = parser.held.find(markers[0][0])
        while at >= 0 and not any(marker.startswith(parser.held[at:]) for marker in markers):
            at = parser.held.find(markers[0][0], at + 1)
        parser.say(parser.held if at < 0 else parser.held[:at])
        if parser.held in markers:
            return parser.held
        yield


def _expect(parser: ToolParser, marker: str, read: int = 0) -> Script:
    """Read a marker after white space, of which `read` characters are read."""
    for number, wanted in enumerate(marker[read:], read):
        character = (yield) if number else (yield from _next(parser))
        if character != wanted:
            raise MalformedError(f"{marker} is missing")


def _list(parser: ToolParser) -> Script:
    """Calls with commas between them, and the closing bracket."""
    separator = ","
    while separator == ",":
        yield from _call(parser, (yield from _next(parser)))
        separator = yield from _next(parser)
    if separator != "]":
        raise MalformedError("a comma or a bracket follows a call")
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


def _call(parser: ToolParser, first: str) -> Script:
    """An object that is a call."""
    call = _Call(parser)
    call.push(first)
    while not call.scanner.complete:
        call.push((yield))
    if not call.begun:
        raise MalformedError("a call has a name")
    parser.end()


def _named(parser: ToolParser, first: str) -> Script:
    """A name, what may stand behind it, and the arguments."""
    head, character = "", first
    while character != "{":
        head += character
        if len(head) > _LONGEST_V11_NAME:
            raise MalformedError("arguments follow a name")
        character = yield
    match = _V11_NAME.fullmatch(head)
    if match is None:
        raise MalformedError("a call has a name")
    yield from _arguments(parser, match[1], character)


def _arguments(parser: ToolParser, name: str, first: str) -> Script:
    """An object that is the arguments of a call."""
    scanner = ValueScanner()
    scanner.push(first)
    parser.begin(name, first)
    while not scanner.complete:
        character = yield
        scanner.push(character)
        parser.argue(character)
    parser.end()


def _python_call(parser: ToolParser, first: str) -> Script:
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
    parser.begin(_checked_name(name), arguments)
    parser.end()


def _name_in(raw: str) -> str:
    """The name that a JSON value is."""
    try:
        name = json.loads(raw)
    except ValueError as error:
        raise MalformedError("a name is a string") from error
    return _checked_name(name if isinstance(name, str) else "")


def _checked_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise MalformedError("no tool has such a name")
    return name
