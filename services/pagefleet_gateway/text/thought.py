"""What a reader of thoughts makes of a text as it arrives."""

from typing import NamedTuple, Protocol


class Thought(NamedTuple):
    """Text that is certain now."""

    reasoning: str = ""
    content: str = ""


class ThoughtParser(Protocol):
    """Parts the text of one choice."""

    @property
    def thinks(self) -> bool:
        """Whether text that comes now is a thought."""
        ...

    def push(self, text: str) -> Thought:
        """What became certain with `text`."""
        ...

    def finish(self) -> Thought:
        """What was held."""
        ...
