"""Text from token ids as they arrive.

What is pushed and finished, joined, is what `decode` gives for all ids at once, in the context of
the prompt. `tokenizers.DecodeStream` does not promise that: it loses an invalid tail, holds all ids
while the text ends in U+FFFD, and gives out bytes of a run that a later byte makes invalid. So text
is released by what the two kinds of vocabulary mean (see `vocabulary`). The cost of a token does
not grow with the length of the output.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from pagefleet_gateway.text.vocabulary import Vocabulary

MAX_HELD_BYTES = 64
_CONTEXT_TOKENS = 8


class Detokenizer:
    """The text of one choice.

    context: ids of the prompt that the output continues; empty where the output is a text of its
    own (chat). Their text is not given out, but a character that they leave incomplete is, once the
    output completes it.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._text: _Text = (
            _ByteText(vocabulary) if vocabulary.byte_level else _PieceText(vocabulary)
        )
        self._text.push(self._last_visible(context))
        self._text.release()
        self.length = 0

    def __repr__(self) -> str:
        return f"Detokenizer({self.length} characters given out)"

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with `token_ids`, which follow those pushed before."""
        return self._count(self._text.push([i for i in token_ids if self._is_visible(i)]))

    def push_one(self, token_id: int) -> tuple[str, int]:
        """As `push`, and the offset in the output, in characters, where the token's text begins.

        A token that only goes on with a character, or with a run of bytes that is still held,
        begins where that does.
        """
        before = self.length
        text = self.push([token_id])
        if self._vocabulary.byte_level or token_id in self._vocabulary.byte_values:
            return text, before
        return text, max(before, self.length - len(self._vocabulary.token_bytes(token_id).decode()))

    def finish(self) -> str:
        """The text of what is still held: incomplete characters become U+FFFD."""
        return self._count(self._text.finish())

    def _count(self, text: str) -> str:
        self.length += len(text)
        return text

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._skipped and token_id in self._vocabulary

    def _last_visible(self, context: Sequence[int]) -> list[int]:
        """The last few ids with a text, and the whole run where a run of bytes is among them."""
        visible: list[int] = []
        for token_id in reversed(context):
            if len(visible) >= _CONTEXT_TOKENS and visible[-1] not in self._vocabulary.byte_values:
                break
            if self._is_visible(token_id):
                visible.append(token_id)
        return visible[::-1]


class _Text(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain."""
        ...

    def release(self) -> str:
        """Give out every complete character, however the text goes on."""
        ...

    def finish(self) -> str:
        """The rest."""
        ...


class _ByteText:
    """Byte-level: an incremental UTF-8 decoder holds at most an incomplete character, 3 bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._vocabulary.token_bytes, token_ids)))

    def release(self) -> str:
        return ""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceText:
    """Pieces: a run of byte tokens is held until it ends, because one invalid byte spoils it all.

    A run that is invalid already is given out at once. One that is longer than `MAX_HELD_BYTES`
    gives out its complete characters, and only in that case can the text differ from `decode`'s:
    when the run turns out to be invalid later.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._leading: list[int] | None = []
        self._run: list[int] = []
        self._run_is_invalid = False

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        if token_id not in self._vocabulary.byte_values:
            return self.finish() + self._decode([token_id])
        self._run.append(token_id)
        if self._run_is_invalid or not _is_utf8_so_far(self._run_bytes()):
            self._run_is_invalid = True
            return self._give_out(len(self._run))
        return self.release() if len(self._run) > MAX_HELD_BYTES else ""

    def release(self) -> str:
        _, complete = codecs.utf_8_decode(self._run_bytes(), "strict", False)
        return self._give_out(complete)

    def finish(self) -> str:
        text = self._give_out(len(self._run))
        self._run_is_invalid = False
        return text

    def _run_bytes(self) -> bytes:
        return bytes(self._vocabulary.byte_values[i] for i in self._run)

    def _give_out(self, count: int) -> str:
        """The text of the first `count` ids of the run."""
        ids, self._run = self._run[:count], self._run[count:]
        if self._run_is_invalid:
            self._leading = None
            return "\ufffd" * count
        return self._decode(ids) if ids else ""

    def _decode(self, ids: list[int]) -> str:
        if self._leading is None:
            return self._vocabulary.continuation(ids)
        self._leading += ids
        text = self._vocabulary.beginning(self._leading)
        if text:
            self._leading = None
        return text


def _is_utf8_so_far(content: bytes) -> bool:
    try:
        codecs.utf_8_decode(content, "strict", False)
    except UnicodeDecodeError:
        return False
    return True
