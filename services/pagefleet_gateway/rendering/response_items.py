"""The output of a response as it grows: what each token said in, items and their events out.

Items come one after another: thoughts, what is said, calls; text behind a call is a message of its
own. The events follow from the tokens alone: which of them came together does not matter.
"""

from collections.abc import Iterator
from typing import Final

from pagefleet_gateway.answers.choice import Piece
from pagefleet_gateway.bodies.tools import call_id
from pagefleet_gateway.rendering.response_events import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from pagefleet_gateway.rendering.response_object import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from pagefleet_gateway.text.logprobs import TokenEntry, chat_form
from pagefleet_gateway.text.vocabulary import Vocabulary
from pagefleet_gateway.tool_parsers.parser import CallDelta

COMPLETE: Final = frozenset({"stop", "tool_calls"})
"""Finishes of an answer that is whole."""


class OutputItems:
    """Those of one response. An event tells of them as they are until the next is asked for."""

    def __init__(self, response: str, vocabulary: Vocabulary) -> None:
        self.items: list[OutputItem] = []
        self._response = response
        self._vocabulary = vocabulary
        self._entries: list[TokenEntry] = []
        """Logprobs of tokens that have said nothing yet."""

    def __repr__(self) -> str:
        return f"<OutputItems of {self._response}: {len(self.items)}>"

    def take(self, piece: Piece) -> Iterator[Event]:
        """What follows from one token, or from the end."""
        self._entries += piece.entries
        if piece.reasoning:
            yield from self._think(piece.reasoning)
        for each in piece.spoken or ([piece.text] if piece.text else []):
            if isinstance(each, CallDelta):
                yield from self._call(each)
            else:
                yield from self._say(each)
        if piece.finish is not None:
            yield from self._finish("completed" if piece.finish in COMPLETE else "incomplete")

    @property
    def _open(self) -> OutputItem | None:
        """The last item, while it goes on."""
        return self.items[-1] if self.items and self.items[-1].status == "in_progress" else None

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _id(self, kind: str) -> str:
        """Of the next item: the same wherever the answer is made again."""
        return f"{kind}_{self._response.removeprefix('resp_')}_{len(self.items)}"

    def _think(self, text: str) -> Iterator[Event]:
        self._entries.clear()
        item = self._open
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(id=self._id("rs"), status="in_progress", content=[])
            yield from self._begin(item)
            item.content.append(ReasoningText(""))
            yield self._part_added(item.id, item.content[0])
        item.content[0].text += text
        yield ReasoningDelta(output_index=self._index, item_id=item.id, delta=text)

    def _say(self, text: str) -> Iterator[Event]:
        logprobs = chat_form(self._entries, self._vocabulary).content
        self._entries.clear()
        item = self._open
        if not isinstance(item, MessageItem):
            item = MessageItem(id=self._id("msg"), status="in_progress", content=[])
            yield from self._begin(item)
            item.content.append(OutputText("", []))
            yield self._part_added(item.id, item.content[0])
        item.content[0].text += text
        item.content[0].logprobs += logprobs
        index = self._index
        yield TextDelta(output_index=index, item_id=item.id, delta=text, logprobs=logprobs)

    def _call(self, call: CallDelta) -> Iterator[Event]:
        self._entries.clear()
        if call.name is not None:
            begun = FunctionCallItem(
                id=self._id("fc"),
                status="in_progress",
                call_id=call_id(self._response, 0, call.index),
                name=call.name,
                arguments="",
            )
            yield from self._begin(begun)
        item = self._open
        assert isinstance(item, FunctionCallItem)
        item.arguments += call.arguments
        yield ArgumentsDelta(output_index=self._index, item_id=item.id, delta=call.arguments)

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        yield from self._end("completed")
        self.items.append(item)
        yield ItemAdded(output_index=self._index, item=item)

    def _part_added(self, item: str, part: OutputText | ReasoningText) -> Event:
        return PartAdded(output_index=self._index, item_id=item, part=part)

    def _finish(self, status: ItemStatus) -> Iterator[Event]:
        """Nothing more comes; an answer that says nothing says an empty text."""
        if not self.items or (self._entries and isinstance(self._open, MessageItem)):
            yield from self._say("")
        yield from self._end(status)

    def _end(self, status: ItemStatus) -> Iterator[Event]:
        item, index = self._open, self._index
        if item is None:
            return
        if isinstance(item, FunctionCallItem):
            yield ArgumentsDone(
                output_index=index, item_id=item.id, name=item.name, arguments=item.arguments
            )
        else:
            (part,) = item.content
            if isinstance(part, OutputText):
                yield TextDone(
                    output_index=index, item_id=item.id, text=part.text, logprobs=part.logprobs
                )
            else:
                yield ReasoningDone(output_index=index, item_id=item.id, text=part.text)
            yield PartDone(output_index=index, item_id=item.id, part=part)
        item.status = status
        yield ItemDone(output_index=index, item=item)
