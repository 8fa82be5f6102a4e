"""`python -m benchmarks.drill.probe URL`: ask it ten times a second, and write what came of it.

A process of its own, so that nothing but the server makes an answer late. A line is when it was
asked (seconds of the machine's monotonic clock), the status (0: no answer), and the seconds taken.
"""

import sys
from time import monotonic, sleep

from benchmarks.drill.served import fetch

PAUSE = 0.1


def main() -> None:
    """Ask until nobody reads any more."""
    while True:
        asked = monotonic()
        status, _ = fetch(sys.argv[1])
        print(asked, status, monotonic() - asked, flush=True)
        sleep(PAUSE)


if __name__ == "__main__":
    main()
