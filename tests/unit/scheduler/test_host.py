"""The host tier: what a plan is told to move, whatever happens before it is made."""

from itertools import count

import pytest

from pagefleet.wire import PROTOCOL, WorkerHello, pack_ints
from pagefleet_scheduler.blocks import BlockKey, BlockPool, chain, root
from pagefleet_scheduler.host import HostTier

SIZE = 4
COMPUTE = 4.0
"""Microseconds to compute a token, so 16 for a block."""


class Device:
    """A device's pool and the host tier behind it."""

    def __init__(self, blocks: int, host_blocks: int, swap_micros: float = 7.0) -> None:
        worker = WorkerHello(
            PROTOCOL, "h", 1, 1, "m", "c", SIZE, blocks, 8, 80, 64, 99,
            host_blocks=host_blocks, swap_micros=swap_micros, compute_micros=COMPUTE,
        )  # fmt: skip
        self.pool = BlockPool(blocks, SIZE)
        self.host = HostTier(worker, self.pool)
        self.pool.evict = self.host.keep
        self._numbers = count()

    def cache(self, blocks: int) -> tuple[list[int], list[BlockKey]]:
        """Compute a sequence of full blocks that is like no other, and let it go."""
        table, keys, digest = self.take(blocks), list[BlockKey](), root(b"")
        for _ in table:
            tokens = pack_ints([next(self._numbers)] * SIZE)
            digest = chain(digest, tokens)
            keys.append(BlockKey(digest, tokens))
        self.index(table, keys)
        self.free(table)
        return table, keys

    def index(self, table: list[int], keys: list[BlockKey]) -> None:
        """Its blocks are computed."""
        _, history = self.pool.match(b"", [])
        for block, key in zip(table, keys, strict=True):
            history = self.pool.index(block, key, history)

    def take(self, blocks: int) -> list[int]:
        """Blocks for a sequence that needs so many."""
        return [self.pool.allocate() for _ in range(blocks)]

    def free(self, table: list[int]) -> None:
        """Take its blocks back."""
        self.host.cancel(table)
        self.pool.release(table)
        self.pool.settle()

    def found(self, keys: list[BlockKey]) -> list[int]:
        """Host blocks that hold a sequence's beginning, of which the device has nothing."""
        assert self.pool.match(b"", keys)[0] == []
        return self.host.pool.match(b"", keys)[0]

    def bring_back(self, keys: list[BlockKey], targets: list[int]) -> list[int]:
        """Give a sequence's beginning these blocks; returns the host's that hold it."""
        held = self.host.hold(keys, self.pool.match(b"", [])[1])
        self.host.bring_back(held, targets)
        return held


def test_what_is_evicted_is_found_again_in_order() -> None:
    device = Device(blocks=3, host_blocks=3)
    table, keys = device.cache(3)
    taken = device.take(3)
    out, none = device.host.take_orders()
    assert (out[::2], none) == ([*reversed(table)], [])
    found = device.found(keys)
    assert found == [*reversed(out[1::2])]
    assert device.bring_back(keys[:2], taken[:2]) == found[:2]
    device.host.check()
    assert device.host.take_orders() == ([], [found[0], taken[0], found[1], taken[1]])
    assert (device.host.moved_out, device.host.moved_in) == (3, 2)
    device.host.check()


def test_a_host_block_is_filled_once_a_plan_by_what_came_last() -> None:
    """A copy with a target that comes twice may leave either there, or a mixture."""
    device = Device(blocks=5, host_blocks=2)
    table, keys = device.cache(5)
    device.take(5)
    out, _ = device.host.take_orders()
    filled = dict(zip(out[::2], out[1::2], strict=True))
    assert len(out) == 4
    assert device.found(keys) == [filled[block] for block in table[:2]]
    assert device.host.moved_out == 2


def test_what_the_host_holds_already_is_not_moved_out_again() -> None:
    device = Device(blocks=2, host_blocks=4)
    _, keys = device.cache(2)
    taken = device.take(2)
    device.bring_back(keys, taken)
    device.host.take_orders()
    device.index(taken, keys)
    device.free(taken)
    device.take(2)
    assert device.host.take_orders() == ([], [])
    assert device.host.pool.cached == 2


def test_what_the_next_plan_reads_stays_until_then() -> None:
    device = Device(blocks=3, host_blocks=1)
    _, wanted = device.cache(1)
    held = device.take(3)
    device.free(held[1:])
    found = device.bring_back(wanted, held[:1])
    device.cache(2)
    device.take(2)
    assert device.found(wanted) == found
    assert device.host.take_orders()[1] == [*found, *held[:1]]
    device.host.check()
    assert device.host.pool.available == 1


def test_nothing_is_moved_to_a_block_that_was_given_back() -> None:
    device = Device(blocks=4, host_blocks=4)
    _, keys = device.cache(4)
    first, second = device.take(2), device.take(2)
    found = device.bring_back(keys, [*first, *second])
    device.free(first)
    device.host.check()
    assert device.host.take_orders()[1] == [found[2], second[0], found[3], second[1]]
    device.host.check()


@pytest.mark.parametrize(("swap_micros", "pays"), [(7.9, True), (8.0, False)])
def test_a_block_is_moved_only_if_there_and_back_is_faster_than_computing(
    swap_micros: float, pays: bool
) -> None:
    device = Device(blocks=1, host_blocks=1, swap_micros=swap_micros)
    _, keys = device.cache(1)
    device.take(1)
    assert bool(device.host.take_orders()[0]) is pays
    assert bool(device.found(keys)) is pays
