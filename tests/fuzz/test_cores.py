"""Messages that no honest peer sends, at the cores of all three parties.

The long run, a million frames, is
`python -m pytest tests/fuzz/test_cores.py --hypothesis-profile=long --timeout=0`.
"""

import random

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.budget import FUZZ
from tests.fuzz.cores import Network

_FRAMES = 1000


@settings(FUZZ, phases=[Phase.generate])
@given(st.integers(0, 2**64 - 1))
def test_no_message_breaks_a_core(seed):
    """The invariants hold at every step, and afterwards a request is served."""
    network = Network(random.Random(seed))
    while network.delivered < _FRAMES:
        network.turn()
    assert network.refused
    network.assert_serves()
