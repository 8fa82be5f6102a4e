"""What a model thinks before it answers, parted from the answer, as the text arrives.

A model that thinks writes `<think>` thoughts `</think>` answer. Some templates write the first tag
themselves, so that the text begins within the thoughts, or both, where nothing is to be thought.
Where the prompt ends with no tag it depends on the model:

    qwen3         thoughts only behind a tag that the text begins with
    deepseek_r1   thoughts from the start, with or without the tag

A text that goes on with a message holds thoughts if the message ends within some.
"""

from typing import Final, NamedTuple

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"

THINKS_AT_ONCE: Final = {"deepseek_r1": True, "qwen3": False}
"""By the name that `--reasoning-parser` has for it."""


def thinks_at_once(family: str, before: str, goes_on: bool) -> bool | None:
    """Whether the text behind `before` begins within thoughts; None: it holds none.

    before: the end of the prompt or, if the text `goes_on` with it, a message.
    """
    said = before.rstrip()
    if goes_on and said:
        return True if said.rfind(_OPEN) > said.rfind(_CLOSE) else None
    if said.endswith(_CLOSE):
        return None
    return said.endswith(_OPEN) or THINKS_AT_ONCE[family]


class Thought(NamedTuple):
    """Text that is certain now."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Reads one choice; at_once: it thinks even where no tag says so."""

    def __init__(self, at_once: bool) -> None:
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
        if len(start) < len(_OPEN) and _OPEN.startswith(start):
            return Thought()
        tagged = start.startswith(_OPEN)
        rest, self._held = start[len(_OPEN) :] if tagged else self._held, ""
        self._state = self._think if tagged or self._at_once else self._answer
        return self._state(rest)

    def _think(self, text: str) -> Thought:
        thoughts, closed, answer = (self._held + text).partition(_CLOSE)
        if closed:
            self._held, self._state = "", self._answer
            return Thought(thoughts, answer)
        undecided = thoughts.rfind("<")
        if undecided < 0 or not _CLOSE.startswith(thoughts[undecided:]):
            undecided = len(thoughts)
        self._held = thoughts[undecided:]
        return Thought(thoughts[:undecided])

    def _answer(self, text: str) -> Thought:
        return Thought(content=text)
