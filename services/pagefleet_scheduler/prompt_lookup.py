"""Drafts without a second model: what followed the last time that the sequence said the same.

The longest end of a sequence that was there before is sought, up to `LONGEST_MATCH` tokens; its
latest place counts, and what followed there, over and over, may follow again (prompt lookup
decoding, Saxena 2023). A client that knows much of the answer can say so (`Submit.prediction`).
"""

import sys
from array import array

import msgspec

LONGEST_MATCH = 8

LOOKBACK = 8192
"""Last tokens that are looked through: a step takes no longer for a longer text."""

_CODEC = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"


class Drafts(msgspec.Struct, frozen=True, gc=False):
    """Tokens that may follow a sequence's last one."""

    tokens: "array[int]"
    match: int
    """Tokens before them that were there before."""


NOTHING = array("i")
NO_DRAFTS = Drafts(NOTHING, 0)


def propose(tokens: "array[int]", count: int, prediction: "array[int]" = NOTHING) -> Drafts:
    """`count` tokens that may follow `tokens`; none if its last one did not come before.

    `prediction`: what it may repeat, as if that had come before it.
    """
    if count <= 0:
        return NO_DRAFTS
    tokens = prediction + tokens[-LOOKBACK:]
    text = _text(tokens)
    match, follows = 0, len(text)
    while match < min(LONGEST_MATCH, len(text) - 1):
        # A longer match ends where a shorter one does, so no later than the latest of these.
        at = text.rfind(text[-(match + 1) :], 0, min(follows, len(text) - 1))
        if at < 0:
            break
        match += 1
        follows = at + match
    if not match:
        return NO_DRAFTS
    period = tokens[follows:]
    return Drafts((period * -(-count // len(period)))[:count], match)


def _text(tokens: "array[int]") -> str:
    """Tokens as characters, which Python finds fast; nothing if one is too large for that."""
    try:
        return tokens.tobytes().decode(_CODEC, "surrogatepass")
    except UnicodeDecodeError:
        return ""
