"""Harmony, in which gpt-oss speaks: messages of several channels, parted as the text arrives
(OpenAI, "OpenAI harmony response format", 2025).

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>      thoughts
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>    what is said before calls
    <|start|>assistant<|channel|>final<|message|>...<|return|>      the answer
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>

The prompt ends within the first header. Whom a message is for may stand behind its channel too.
Calls of tools are handed on as content, each in one form, which `tool_parsers.openai` reads.
Messages of one kind are parted by an empty line. Text that is no message is content.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Final

from pagefleet_gateway.text.thought import Thought
from pagefleet_gateway.tool_parsers.openai import CALL_BEGIN, CALL_END
from pagefleet_gateway.tool_parsers.reading import certain

NAME: Final = "openai_gptoss"
"""That `--reasoning-parser` has for it."""

STOPS: Final = ("<|return|>", "<|call|>")
"""Special tokens that end an answer."""

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
_BEGINS: Final = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", "assistant", "to=")
_ENDS: Final = ("<|end|>", *STOPS, _START, _CHANNEL)
_LONGEST_HEADER: Final = 256
_FOR: Final = re.compile(r"\bto=functions\.([^\s<]+)")
_OF: Final = re.compile(r"<\|channel\|>\s*(\w+)")

_THOUGHT, _CONTENT, _CALL = "thought", "content", "call"


class Harmony:
    """The family of models that speak it, beside those of `reasoning.Marks`."""

    special = True
    """Its marks are special tokens, which must be part of the text."""

    def reader(self, before: str, goes_on: bool) -> "Callable[[], HarmonyParser]":
        """See `reasoning.reader`."""
        if goes_on:
            return partial(HarmonyParser, goes_on=True)
        _, start, begun = before.rpartition(_START)
        return partial(HarmonyParser, begun.removeprefix("assistant") if start else "")


class HarmonyParser:
    """Reads one choice, whose first header has `begun`, or which `goes_on` with an answer."""

    def __init__(self, begun: str = "", *, goes_on: bool = False) -> None:
        self._kind = _CONTENT
        self._in_body = goes_on
        self._held = self._gap = ""
        self._kinds: set[str] = set()
        self.push(begun)

    def __repr__(self) -> str:
        return f"<HarmonyParser: {self._kind}, {len(self._held)} characters held>"

    @property
    def thinks(self) -> bool:
        """Whether text that comes now is a thought."""
        return self._in_body and self._kind == _THOUGHT

    def push(self, text: str) -> Thought:
        """What became certain with `text`."""
        self._held += text
        thoughts: list[Thought] = []
        while (thought := self._body() if self._in_body else self._header()) is not None:
            thoughts.append(thought)
        return Thought(
            "".join(each.reasoning for each in thoughts), "".join(each.content for each in thoughts)
        )

    def finish(self) -> Thought:
        """What was held; the beginning of a header belongs to the notation."""
        held, self._held = self._held, ""
        if self._in_body:
            return self._said(held)
        return Thought() if held.lstrip().startswith("<|") else Thought(content=held)

    def _header(self) -> Thought | None:
        begun = self._held.lstrip()
        if not begun:
            return None
        end = begun.find(_MESSAGE, 0, _LONGEST_HEADER)
        if not any(begun.startswith(mark) or mark.startswith(begun) for mark in _BEGINS):
            return self._no_header()
        if end < 0:
            return None if len(begun) < _LONGEST_HEADER else self._no_header()
        header, self._held = begun[:end], begun[end + len(_MESSAGE) :]
        name, channel = _FOR.search(header), _OF.search(header)
        if name is not None:
            self._begin(_CALL)
            return Thought(content=CALL_BEGIN + name[1] + _MESSAGE)
        self._begin(_THOUGHT if channel is not None and channel[1] == "analysis" else _CONTENT)
        return Thought()

    def _no_header(self) -> Thought:
        """What is held is text; a mark that it begins with is none."""
        self._begin(_CONTENT)
        first, self._held = self._held[:1], self._held[1:]
        return self._said(first)

    def _begin(self, kind: str) -> None:
        self._kind, self._in_body = kind, True
        self._gap = "\n\n" if kind in self._kinds else ""

    def _body(self) -> Thought | None:
        ends = [(self._held.find(mark), mark) for mark in _ENDS if mark in self._held]
        if not ends:
            known = certain(self._held, _ENDS)
            said, self._held = self._held[:known], self._held[known:]
            return self._said(said) if said else None
        at, mark = min(ends)
        said = self._held[:at] + (CALL_END if self._kind == _CALL else "")
        self._held = self._held[at if mark in _BEGINS else at + len(mark) :]
        self._in_body = False
        return self._said(said)

    def _said(self, text: str) -> Thought:
        if not text or self._kind == _CALL:
            return Thought(content=text)
        text, self._gap = self._gap + text, ""
        self._kinds.add(self._kind)
        return Thought(text) if self._kind == _THOUGHT else Thought(content=text)
