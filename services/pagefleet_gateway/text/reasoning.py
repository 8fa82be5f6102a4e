"""What a model thinks before it answers, parted from the answer, as the text arrives.

A model that thinks writes its thoughts between marks, and its answer behind them. Some templates
write the first mark themselves, so that the text begins within the thoughts, or both, where nothing
is to be thought. Where the prompt ends with no mark it depends on the model: some think only behind
a mark that the text begins with, others at once, with or without it.

A text that goes on with a message holds thoughts if the message ends within some.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pagefleet_gateway.text import harmony
from pagefleet_gateway.text.harmony import Harmony
from pagefleet_gateway.text.thought import Thought, ThoughtParser
from pagefleet_gateway.tool_parsers.reading import certain


@dataclass(frozen=True)
class Marks:
    """How a family of models parts thoughts from the rest."""

    opens: Sequence[str] = ("<think>",)
    closes: Sequence[str] = ("</think>",)
    at_once: bool = False
    """It thinks from the start, with or without the mark."""
    special: bool = False
    """They are special tokens, which must be part of the text."""


FAMILIES: Final[dict[str, Marks | Harmony]] = {
    "qwen3": Marks(),
    "glm45": Marks(),
    "deepseek_v3": Marks(),
    "deepseek_r1": Marks(at_once=True),
    "olmo3": Marks(at_once=True),
    "mistral": Marks(["[THINK]"], ["[/THINK]"], special=True),
    "granite": Marks(
        ["Here is my thought process:", "Here's my thought process:"],
        ["Here is my response:", "Here's my response:"],
    ),
    harmony.NAME: Harmony(),
}
"""By the name that `--reasoning-parser` has for it; `granite` is of the versions 3.x."""


def reader(
    marks: Marks | Harmony, before: str, goes_on: bool
) -> "Callable[[], ThoughtParser] | None":
    """What makes the parsers of the text behind `before`; None: it holds no thoughts.

    before: the end of the prompt or, if the text `goes_on` with it, a message.
    """
    if isinstance(marks, Harmony):
        return marks.reader(before, goes_on)
    said = before.rstrip()
    opened = max(map(said.rfind, marks.opens))
    closed = max(map(said.rfind, marks.closes))
    if goes_on and said:
        return partial(ReasoningParser, marks, at_once=True) if opened > closed else None
    if said.endswith(tuple(marks.closes)):
        return None
    at_once = marks.at_once or said.endswith(tuple(marks.opens))
    return partial(ReasoningParser, marks, at_once=at_once)


class ReasoningParser:
    """See `ThoughtParser`; at_once: it thinks even where no mark says so."""

    def __init__(self, marks: Marks, at_once: bool) -> None:
        self._marks = marks
        self._at_once = at_once
        self._state = self._begin
        self._held = ""

    def __repr__(self) -> str:
        return f"<ReasoningParser: {self._state.__name__}, {len(self._held)} characters held>"

    @property
    def thinks(self) -> bool:
        """Whether text that comes now is a thought."""
        return self._state == self._think or (self._state == self._begin and self._at_once)

    def push(self, text: str) -> Thought:
        """What became certain with `text`."""
        return self._state(text)

    def finish(self) -> Thought:
        """What was held."""
        held, self._held = self._held, ""
        return Thought(held, "") if self.thinks else Thought("", held)

    def _begin(self, text: str) -> Thought:
        self._held += text
        start = self._held.lstrip()
        mark = next((mark for mark in self._marks.opens if start.startswith(mark)), None)
        if mark is None and any(mark.startswith(start) for mark in self._marks.opens):
            return Thought()
        rest, self._held = self._held if mark is None else start[len(mark) :], ""
        self._state = self._answer if mark is None and not self._at_once else self._think
        return self._state(rest)

    def _think(self, text: str) -> Thought:
        text = self._held + text
        ends = [(text.find(mark), mark) for mark in self._marks.closes if mark in text]
        if ends:
            at, mark = min(ends)
            self._held, self._state = "", self._answer
            return Thought(text[:at], text[at + len(mark) :])
        at = certain(text, self._marks.closes)
        self._held = text[at:]
        return Thought(text[:at])

    def _answer(self, text: str) -> Thought:
        return Thought(content=text)
