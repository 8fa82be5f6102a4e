"""The network of `cores`, steered by libFuzzer: `python -m tests.fuzz.guided -max_total_time=60`.

Needs atheris, which `make test-clients` installs in an environment of its own. What it tries next
follows from which branches of the cores were taken: the bytes that it makes are the draws that
decide what the clients do and how frames are damaged. Options are libFuzzer's (`-len_control=0
-max_len=4000`: begin with tries that are long enough); a crash is written to a file, which repeats
it as an argument.
"""

import random
import sys

import atheris

with atheris.instrument_imports(
    include=["pagefleet", "pagefleet_gateway", "pagefleet_scheduler", "pagefleet_worker"]
):
    from tests.fuzz.cores import Network

FRAMES = 200
"""Of one try."""


class Draws(random.Random):
    """Random numbers out of given bytes; when they are used up, those of a fixed generator."""

    def __init__(self, content: bytes) -> None:
        super().__init__(0)
        self._content = content
        self._used = 0

    def getrandbits(self, k: int) -> int:
        """The next `k` bits."""
        size = (k + 7) // 8
        part = self._content[self._used : self._used + size]
        self._used += size
        if len(part) < size:
            return super().getrandbits(k)
        return int.from_bytes(part, "little") & ((1 << k) - 1)

    def random(self) -> float:
        """The next 16 bits, as a number below 1."""
        return self.getrandbits(16) / 65536


def one_try(content: bytes) -> None:
    """Let a network live on these bytes."""
    network = Network(Draws(content))
    while network.delivered < FRAMES:
        network.turn()


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_try)
    atheris.Fuzz()
