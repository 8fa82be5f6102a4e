"""Drafts without a second model: what followed the last time that the sequence said the same.

The longest end of a sequence that was there before is sought, up to `LONGEST_MATCH` tokens; its
latest place counts, and what followed there, over and over, may follow again (prompt lookup
decoding, Saxena 2023).
"""

from array import array

import msgspec

LONGEST_MATCH = 8

LOOKBACK = 8192
"""Last tokens that are looked through: a step takes no longer for a longer text."""


class Drafts(msgspec.Struct, frozen=True, gc=False):
    """Tokens that may follow a sequence's last one."""

    tokens: "array[int]"
    match: int
    """Tokens before them that were there before."""


NO_DRAFTS = Drafts(array("i"), 0)


def propose(tokens: "array[int]", count: int) -> Drafts:
    """`count` tokens that may follow `tokens`; none if its last one did not come before."""
    if count <= 0:
        return NO_DRAFTS
    tokens = tokens[-LOOKBACK:]
    packed, size = tokens.tobytes(), tokens.itemsize
    match, follows = 0, len(tokens)
    while match < LONGEST_MATCH and match + 1 < len(tokens):
        # A longer match ends where a shorter one does, so no later than the latest of these.
        found = _rfind(packed, packed[-(match + 1) * size :], min(follows, len(tokens) - 1) * size)
        if found is None:
            break
        match, follows = match + 1, found // size
    if not match:
        return NO_DRAFTS
    period = tokens[follows:]
    return Drafts((period * -(-count // len(period)))[:count], match)


def _rfind(packed: bytes, end: bytes, before: int) -> int | None:
    """Where the latest whole tokens that equal `end`, and lie before `before`, end."""
    size = array("i").itemsize
    at = packed.rfind(end, 0, before)
    while at > 0 and at % size:
        at = packed.rfind(end, 0, at + len(end) - 1)
    return at + len(end) if at >= 0 else None
