"""The content of a message as it grows: what each token said in, blocks and their events out.

Blocks come one after another: thoughts, text, calls; text behind a call is a block of its own. The
events follow from the tokens alone: which of them came together does not matter.
"""

from collections.abc import Iterator
from hashlib import sha256

from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.bodies.messages_body import INVALID_JSON
from pagefleet_gateway.bodies.tools import as_object, call_id
from pagefleet_gateway.rendering.messages_object import (
    AnswerText,
    AnswerThoughts,
    BlockDelta,
    BlockEvent,
    BlockStart,
    BlockStop,
    ContentBlock,
    InputPiece,
    MadeCall,
    SignaturePiece,
    TextPiece,
    ThinkingPiece,
)
from pagefleet_gateway.tool_parsers.parser import CallDelta


class ContentBlocks:
    """Those of one message."""

    def __init__(self, message: str) -> None:
        self.blocks: list[ContentBlock] = []
        self._message = message
        self._open: ContentBlock | None = None
        """The last, while it goes on."""
        self._arguments = ""
        """Of the call that goes on."""

    def __repr__(self) -> str:
        return f"<ContentBlocks of {self._message}: {len(self.blocks)}>"

    def take(self, piece: Piece) -> Iterator[BlockEvent]:
        """What follows from one token, or from the end."""
        if piece.reasoning:
            yield from self._think(piece.reasoning)
        for each in piece.spoken or ([piece.text] if piece.text else []):
            if isinstance(each, CallDelta):
                yield from self._call(each)
            else:
                yield from self._say(each)
        if piece.finish is not None:
            yield from self._end()

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1

    def _think(self, text: str) -> Iterator[BlockEvent]:
        if not isinstance(self._open, AnswerThoughts):
            yield from self._begin(AnswerThoughts(""))
        assert isinstance(self._open, AnswerThoughts)
        self._open.thinking += text
        yield BlockDelta(self._index, ThinkingPiece(text))

    def _say(self, text: str) -> Iterator[BlockEvent]:
        if not isinstance(self._open, AnswerText):
            yield from self._begin(AnswerText(""))
        assert isinstance(self._open, AnswerText)
        self._open.text += text
        yield BlockDelta(self._index, TextPiece(text))

    def _call(self, call: CallDelta) -> Iterator[BlockEvent]:
        if call.name is not None:
            id = call_id(self._message, 0, call.index)
            yield from self._begin(MadeCall(id, call.name, {}))
        self._arguments += call.arguments
        yield BlockDelta(self._index, InputPiece(call.arguments))

    def _begin(self, block: ContentBlock) -> Iterator[BlockEvent]:
        yield from self._end()
        self.blocks.append(block)
        self._open, self._arguments = block, ""
        yield BlockStart(self._index, block)

    def _end(self) -> Iterator[BlockEvent]:
        block, self._open = self._open, None
        if block is None:
            return
        if isinstance(block, AnswerThoughts):
            block.signature = sha256(block.thinking.encode()).hexdigest()
            yield BlockDelta(self._index, SignaturePiece(block.signature))
        if isinstance(block, MadeCall):
            given = as_object(self._arguments)
            block.input = given if isinstance(given, dict) else {INVALID_JSON: given}
        yield BlockStop(self._index)
