"""Blocks on their way between the pool of the device and that of the host, beside the computation.

On a GPU they move on a stream of their own. What may overlap follows from the rules of the plan
(`wire`). A block that plan N swaps out is full and held by nobody: the result of the step that
filled it has been read, so no step under way writes it, and the copy waits for the end of step
N - 2 only, not for N - 1, which is still running. Plan N itself may write it: its computation waits
for the copy. A block that plan N swaps in was free; only a row of step N - 1 whose sequence ended
meanwhile may still write there, or a copy of N, and only then does the move wait for them. The
computation of N waits for what it swaps in. Moves among each other keep their order.

On a CPU everything happens at once, in the order of the plan.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pagefleet_worker.paging.pools import swap_blocks
from pagefleet_worker.paging.slots import Row, Step


class Lane(Protocol):
    """Orders work beside the computation; events are whatever it says."""

    def mark(self) -> Any:
        """An event: the end of all computation that has been ordered."""
        ...

    def aside(self, after: Any, work: Callable[[], None]) -> Any:
        """Order `work` behind an event and all earlier work aside; its own event."""
        ...

    def wait(self, event: Any) -> None:
        """Let the computation that is ordered from now on wait for an event."""
        ...


class AtOnce:
    """A `Lane` where whatever is ordered is done."""

    def mark(self) -> None:
        """Nothing is under way."""

    def aside(self, after: None, work: Callable[[], None]) -> None:
        """Do it."""
        work()

    def wait(self, event: None) -> None:
        """Nothing is under way."""


class SideStream:
    """A `Lane` of a GPU, the current one."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """See `Lane`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def aside(self, after: torch.cuda.Event, work: Callable[[], None]) -> torch.cuda.Event:
        """See `Lane`."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            work()
            return self.mark()

    def wait(self, event: torch.cuda.Event) -> None:
        """See `Lane`."""
        torch.cuda.current_stream().wait_event(event)


def lane_of(device: torch.device) -> Lane:
    """The one that suits `device`."""
    return SideStream() if device.type == "cuda" else AtOnce()


class Swaps:
    """Moves the blocks that plans swap; called around the other work of every step, in order."""

    def __init__(self, pool: Tensor, host_pool: Tensor, lane: Lane) -> None:
        self._pool, self._host_pool = pool, host_pool
        self._lane = lane
        self._ends: deque[Any] = deque(maxlen=2)
        """Of the last two steps."""
        self._rows: Sequence[Row] = ()
        """Of the last step."""

    def reset(self) -> None:
        """Begin an epoch: its blocks may be those that old steps still use."""
        self._ends.clear()

    def take_out(self, step: Step) -> None:
        """Order the swaps out, ahead of the step's copies."""
        if step.swap_out:
            after = self._ends[0] if self._ends else self._lane.mark()
            self._move(after, self._pool, self._host_pool, step.swap_out)

    def bring_in(self, step: Step) -> None:
        """Order the swaps in, behind the step's copies and ahead of its forward pass."""
        if step.swap_in:
            targets = {device for _, device in step.swap_in}
            free = bool(self._ends) and targets.isdisjoint(self._touched(step))
            after = self._ends[0] if free else self._lane.mark()
            self._move(after, self._host_pool, self._pool, step.swap_in)

    def end(self, step: Step) -> None:
        """All of the step's computation has been ordered."""
        self._ends.append(self._lane.mark())
        self._rows = step.rows

    def _move(
        self, after: Any, source: Tensor, target: Tensor, pairs: list[tuple[int, int]]
    ) -> None:
        event = self._lane.aside(after, partial(swap_blocks, source, target, pairs))
        self._lane.wait(event)

    def _touched(self, step: Step) -> set[int]:
        """Blocks of the last step's rows and of this step's copies."""
        copied = {block for pair in step.copies for block in pair}
        return copied.union(*(row.slot.table for row in self._rows))
