"""Frames with a right checksum and anything before it, at every decoder.

The long run, a million frames at each of the four, is
`python -m pytest tests/fuzz/test_decoders.py --hypothesis-profile=long --timeout=0`.
"""

import random

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pagefleet import wire
from tests.fuzz.budget import FUZZ
from tests.fuzz.frames import Frames

DECODERS = (
    wire.decode_from_gateway,
    wire.decode_from_worker,
    wire.decode_to_gateway,
    wire.decode_to_worker,
)
_FRAMES = 1000


@settings(FUZZ, phases=[Phase.generate])
@given(st.integers(0, 2**64 - 1))
def test_a_frame_is_a_message_or_refused(seed):
    """What is taken says the same when it is sent on."""
    draw = random.Random(seed)
    frames = Frames(draw)
    taken = 0
    for _ in range(_FRAMES):
        content = frames.message()
        if draw.random() < 0.7:
            content = frames.damaged(content)
        if draw.random() < 0.1:
            content = frames.noise()
        frame = wire.sealed(content)
        for decode in DECODERS:
            try:
                message = decode(frame)
            except wire.WireError:
                continue
            taken += 1
            again = wire.encode(message)
            assert wire.encode(decode(again)) == again
    assert 0 < taken < _FRAMES
