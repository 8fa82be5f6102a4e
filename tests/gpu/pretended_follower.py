"""A rank beside rank 0, on a GPU that is not there: `pagefleet_worker.follower`, whose steps wait
for nothing either.
"""

from collections.abc import Iterator
from unittest.mock import patch

from pagefleet_worker import follower
from pagefleet_worker.ending import run_to_end
from pagefleet_worker.group import Order
from pagefleet_worker.step.engine import TorchEngine
from tests.gpu.engines import no_waiting
from tests.gpu.pretended import pretended_gpu

_follow = follower.follow


def main() -> None:
    """As `follower.main`."""
    with pretended_gpu(), patch.object(follower, "follow", follow):
        follower.main()


def follow(engine: TorchEngine, orders: Iterator[Order]) -> None:
    """As `follower.follow`."""
    with no_waiting():
        _follow(engine, orders)


if __name__ == "__main__":
    run_to_end(main)
