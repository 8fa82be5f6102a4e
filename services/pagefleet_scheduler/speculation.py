"""Drafts without a second model: what followed the last time that the sequence said the same.

The tokens before the next one are sought in what came before, longest match first; the latest place
wins, and what followed there, over and over, is fed on trial in the same row (prompt lookup
decoding, Saxena 2023). Every position is sampled with its own u = f(seed, choice, position), and a
draft stays only if it is what was sampled: the stream is the same with and without drafts.
"""

from array import array

LONGEST_MATCH = 4
SHORTEST_MATCH = 2

LOOKBACK = 8192
"""Last tokens that are looked through: a step takes no longer for a longer text."""


def propose(tokens: "array[int]", count: int) -> "array[int]":
    """`count` tokens that may follow `tokens`; none if nothing like its end came before."""
    if count <= 0:
        return array("i")
    tokens = tokens[-LOOKBACK:]
    packed = tokens.tobytes()
    size = tokens.itemsize
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        if len(tokens) <= length:
            continue
        end = packed[-length * size :]
        at = packed.rfind(end, 0, len(packed) - size)
        while at > 0 and at % size:
            at = packed.rfind(end, 0, at + len(end) - 1)
        if at >= 0 and at % size == 0:
            period = tokens[at // size + length :]
            return (period * -(-count // len(period)))[:count]
    return array("i")
