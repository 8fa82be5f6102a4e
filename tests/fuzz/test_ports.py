"""Strangers at the scheduler's sockets, who speak ZeroMQ and send messages of all kinds and noise,
while clients are served.

The long run: `python -m pytest tests/fuzz/test_ports.py --hypothesis-profile=long --timeout=0 -s`.
"""

import random

import pytest
import zmq
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pagefleet import wire
from tests.fuzz.budget import FUZZ
from tests.fuzz.frames import Frames
from tests.fuzz.served import SIDES

_FRAMES = 50
_DRAIN_MS = 1000


@pytest.mark.parametrize("side", SIDES)
def test_no_stranger_hurts(cell, side):
    with zmq.Context() as context:

        @settings(FUZZ, phases=[Phase.generate])
        @given(st.integers(0, 2**64 - 1))
        def intrude(seed):
            draw = random.Random(seed)
            frames = Frames(draw)
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = _DRAIN_MS
                dealer.connect(cell.endpoint(side))
                for _ in range(_FRAMES):
                    dealer.send_multipart(_parts(draw, frames))

        with cell.unhurt():
            intrude()


def _parts(draw, frames):
    """The parts of one ZeroMQ message; only those of one part are frames."""
    content = frames.noise() if draw.random() < 0.2 else frames.message()
    if draw.random() < 0.3:
        return [content] * draw.randint(1, 3)
    return [wire.sealed(content)]
