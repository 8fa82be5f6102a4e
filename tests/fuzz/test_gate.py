"""Connections to a hub behind its gate that are a member's own, damaged, or nothing of the kind.

The long run: `python -m pytest tests/fuzz/test_gate.py --hypothesis-profile=long --timeout=0 -s`.
"""

import random
import socket
from contextlib import closing, suppress

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.budget import FUZZ
from tests.unit.shared.gated import GREETING_BYTES, HOST, RUBBISH, Cell, Relay

_CONNECTIONS = 100


def test_only_members_are_heard(tmp_path):
    with closing(Cell(tmp_path)) as cell:
        with closing(Relay(cell.port)) as relay:
            member = cell.peer(cell.key, relay.endpoint)
            assert cell.answers(member)
            member.close()

        @settings(FUZZ, phases=[Phase.generate])
        @given(st.integers(0, 2**64 - 1))
        def intrude(seed):
            draw = random.Random(seed)
            for _ in range(_CONNECTIONS):
                with socket.create_connection((HOST, cell.port)) as stranger:
                    _say(draw, stranger, _damaged(draw, relay.sent))
            assert len(cell.hear()) == 1

        intrude()
        assert cell.answers(cell.peer(cell.key))


def _damaged(draw, recorded):
    """A connection of a member with bits flipped, or another end, or rubbish with more of it."""
    match draw.randrange(3):
        case 0:
            flipped = bytearray(recorded)
            for _ in range(draw.choice([1, 2, 8])):
                flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
            return bytes(flipped)
        case 1:
            kept = draw.choice([GREETING_BYTES, draw.randrange(len(recorded))])
            return recorded[:kept] + draw.randbytes(draw.randrange(600))
        case _:
            return draw.choice([*RUBBISH.values()]) + draw.randbytes(draw.randrange(300))


def _say(draw, stranger, words):
    """In pieces, between which the hub may answer."""
    stranger.settimeout(0.02)
    with suppress(OSError):
        while words:
            size = draw.choice([1, GREETING_BYTES, len(words)])
            stranger.sendall(words[:size])
            words = words[size:]
            if draw.random() < 0.05:
                stranger.recv(1000)
