"""The second tier of a worker's prefix cache: evicted blocks, kept by content in host memory.

When a cached block of the device is taken for something else, its content moves to a host block;
when a sequence comes that begins with that content, it moves back, to whichever device block the
sequence has there. So a preempted sequence finds its blocks again: preemption by swapping
(PagedAttention, Kwon et al., SOSP 2023, section 4.5) and prefix caching are one mechanism. Moving
pays only if it is faster than computing again; the worker measured both at its start.

A plan swaps out before it swaps in, and both before its forward pass. So a host block may be read
by the very plan that fills it. A block that the next plan will read is held until then. A block
that is taken again before the plan that should fill it was made gets the later content only.
"""

from collections.abc import Sequence

from pagefleet.wire import WorkerHello
from pagefleet_scheduler.blocks import BlockKey, BlockPool, Entry, History


class HostTier:
    """The host blocks of one worker, and the moves that its next plan orders."""

    def __init__(self, worker: WorkerHello, device: BlockPool) -> None:
        move, compute = worker.swap_micros, worker.block_size * worker.compute_micros
        self.worthwhile = worker.host_blocks > 0 and 2 * move < compute
        self.pool = BlockPool(worker.host_blocks, worker.block_size, digest=device.digest)
        self.pool.join(device)
        self.moved_out = 0
        self.moved_in = 0
        self._out: dict[int, int] = {}
        """Device blocks to move out, by the host blocks that they fill."""
        self._in: dict[int, int] = {}
        """Host blocks to move in, by the device blocks that they fill."""

    def __repr__(self) -> str:
        return f"<HostTier {self.moved_out} moved out, {self.moved_in} in, {self.pool!r}>"

    def keep(self, block: int, entry: Entry) -> None:
        """A device block is taken for something else: keep its content, if that pays."""
        if not self.worthwhile or self.pool.holds(entry) or not self.pool.available:
            return
        target = self.pool.allocate()
        self.pool.adopt(target, entry)
        self.pool.release([target])
        self.pool.settle()
        self._out[target] = block

    def hold(self, keys: Sequence[BlockKey], history: History) -> list[int]:
        """The host blocks that continue the device's hits, held until they are moved."""
        found, _ = self.pool.follow(keys, history)
        for block in found:
            self.pool.share(block)
        return found

    def bring_back(self, held: Sequence[int], targets: Sequence[int]) -> None:
        """Move host blocks to the device blocks that a sequence was given."""
        self._in.update(zip(targets, held, strict=True))

    def cancel(self, table: Sequence[int]) -> None:
        """The device blocks of a table are given back: nothing may be moved there any more."""
        if self._in:
            self.pool.release([self._in.pop(block) for block in table if block in self._in])
            self.pool.settle()

    def take_orders(self) -> tuple[list[int], list[int]]:
        """Pairs to swap out (device, host) and in (host, device), in a row, for a plan made now."""
        out = [block for host, device in self._out.items() for block in (device, host)]
        into = [block for device, host in self._in.items() for block in (host, device)]
        self.moved_out += len(self._out)
        self.moved_in += len(self._in)
        self.pool.release(into[::2])
        self.pool.settle()
        self._out, self._in = {}, {}
        return out, into

    def check(self) -> None:
        """Assert the invariants: what is held is what the next plan will read."""
        self.pool.check([source] for source in self._in.values())
