"""Drafts without a second model: what followed the last time that the sequence said the same.

The last tokens of a sequence, as many as possible up to `LONGEST_MATCH`, are looked for earlier in
it. Of the places where they occur the latest counts: what followed there, repeated if it is short,
may follow again (prompt lookup decoding, Saxena 2023). A client that knows much of the answer can
say so (`Submit.prediction`).

Tokens are kept as characters of a string, because Python searches strings fast.
"""

from array import array

import msgspec

LONGEST_MATCH = 8

LOOKBACK = 8192
"""How many of the last tokens are searched, so that a step takes no longer for a longer text."""


class Drafts(msgspec.Struct, frozen=True, gc=False):
    """Tokens that may follow a sequence's last one."""

    tokens: "array[int]"
    match: int
    """How many tokens before them were found earlier."""


NOTHING = array("i")
NO_DRAFTS = Drafts(NOTHING, 0)


class PromptLookup:
    """What one sequence has said; before that, what it was predicted to say."""

    def __init__(self, prediction: "array[int]" = NOTHING) -> None:
        self._text = _text(prediction)
        self._predicted = len(self._text)
        self._read = 0

    def __repr__(self) -> str:
        return f"<PromptLookup {self._read} tokens read, {len(self._text)} kept>"

    def propose(self, tokens: "array[int]", count: int) -> Drafts:
        """`count` tokens that may follow `tokens`; none if the last one occurs nowhere before.

        `tokens`: begin with those of the call before.
        """
        if count <= 0:
            return NO_DRAFTS
        text = self._text_of(tokens)
        match, follows = 0, len(text)
        while match < min(LONGEST_MATCH, len(text) - 1):
            # A longer match ends where a shorter one does, so no later than the latest of those.
            at = text.rfind(text[-(match + 1) :], 0, min(follows, len(text) - 1))
            if at < 0:
                break
            match += 1
            follows = at + match
        if not match:
            return NO_DRAFTS
        period = text[follows : follows + count]
        drafts = (period * -(-count // len(period)))[:count]
        return Drafts(array("i", map(ord, drafts)), match)

    def _text_of(self, tokens: "array[int]") -> str:
        """The prediction and the last tokens."""
        if len(tokens) > self._read:
            self._text += _text(tokens[max(self._read, len(tokens) - LOOKBACK) :])
            self._read = len(tokens)
            if len(self._text) > self._predicted + LOOKBACK:
                self._text = self._text[: self._predicted] + self._text[-LOOKBACK:]
        return self._text


def _text(tokens: "array[int]") -> str:
    """Tokens as characters; nothing if one is too large to be a character."""
    try:
        return "".join(map(chr, tokens))
    except ValueError:
        return ""
