"""A chat's answer is more than text: thoughts, content, and calls of tools, in that order."""

from collections.abc import Callable
from dataclasses import dataclass

from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.text.thought import Thought, ThoughtParser
from pagefleet_gateway.tool_parsers.parser import Spoken, ToolParser


@dataclass(frozen=True)
class MessageForm:
    """How an answer is to be read."""

    thoughts: Callable[[], ThoughtParser] | None = None
    """Makes what parts its thoughts from the rest; None: it has none."""
    parser: Callable[[], ToolParser] | None = None
    """Makes what reads its calls; None: it has none."""
    parallel: bool = True
    """Calls after the first are kept."""
    shows_thoughts: bool = True
    keeps_special: bool = False
    """Special tokens are part of the text."""


class MessageReader:
    """Reads the pieces of one choice, in their order."""

    def __init__(self, form: MessageForm) -> None:
        self._reasoning = None if form.thoughts is None else form.thoughts()
        self._tools = None if form.parser is None else form.parser()
        self._parallel = form.parallel
        self._shows_thoughts = form.shows_thoughts
        self._called = False
        self.thought_tokens = 0
        """In which it thought; exact where each piece is of one token."""

    def read(self, piece: Piece) -> None:
        """Part the piece's text into reasoning, content and calls, in place."""
        thoughts, piece.text = self._think(piece)
        piece.reasoning = thoughts if self._shows_thoughts else ""
        if self._tools is None:
            return
        spoken = self._tools.push(piece.text)
        if piece.finish is not None:
            spoken += self._tools.finish()
        self._speak(piece, spoken, self._tools.in_call)

    def _think(self, piece: Piece) -> Thought:
        if self._reasoning is None:
            return Thought("", piece.text)
        thinks = self._reasoning.thinks
        thought = self._reasoning.push(piece.text)
        if thinks or self._reasoning.thinks:
            self.thought_tokens += len(piece.tokens)
        if piece.finish is None:
            return thought
        rest = self._reasoning.finish()
        return Thought(thought.reasoning + rest.reasoning, thought.content + rest.content)

    def _speak(self, piece: Piece, spoken: list[Spoken], in_call: bool) -> None:
        piece.text = "".join(each for each in spoken if isinstance(each, str))
        piece.spoken = [
            each for each in spoken if isinstance(each, str) or self._parallel or each.index == 0
        ]
        self._called = self._called or bool(piece.calls)
        cut = in_call and isinstance(piece.stop_reason, str)
        if self._called and piece.finish == "stop" and not cut:
            piece.finish = "tool_calls"
