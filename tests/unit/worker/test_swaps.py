"""Moves of blocks beside the computation: what is moved, and who waits for whom."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pagefleet.params import SamplingParams
from pagefleet_worker.paging.pools import bring_in, make_host_pool, swap_blocks, take_out
from pagefleet_worker.paging.slots import Row, Slot, Step
from pagefleet_worker.paging.swaps import AtOnce, Swaps

POOL = (3, 2, 6, 2, 4, 8)


class Ledger:
    """A lane that does everything at once, and keeps what should have waited for what."""

    def __init__(self) -> None:
        self.marks = 0
        self.after: list[Any] = []
        self.waited: list[Any] = []

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def aside(self, after: Any, work: Callable[[], None]) -> str:
        work()
        self.after.append(after)
        return f"move {len(self.after)}"

    def wait(self, event: Any) -> None:
        self.waited.append(event)


def step_of(
    table: list[int] | None = None,
    out: list[tuple[int, int]] | None = None,
    back: list[tuple[int, int]] | None = None,
    copies: list[tuple[int, int]] | None = None,
) -> Step:
    """A step whose one row has the blocks of `table`."""
    slot = Slot(SamplingParams(max_tokens=1, seed=0), 1, array("i", [1]), [0], b"")
    slot.table.extend(table or [])
    rows = [Row(0, slot, 0, array("i", [1]), 0)] if table else []
    return Step(1, 0, rows, [], [], copies or [], out or [], back or [])


def run(swaps: Swaps, step: Step) -> None:
    swaps.take_out(step)
    swaps.bring_in(step)
    swaps.end(step)


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randn(POOL)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def swaps(pool: torch.Tensor, ledger: Ledger) -> Swaps:
    host = make_host_pool(pool, pool.nbytes)
    assert host is not None
    return Swaps(pool, host, ledger)


def test_blocks_go_out_and_come_back(pool: torch.Tensor) -> None:
    host = make_host_pool(pool, pool.nbytes)
    assert host is not None
    before = pool.clone()
    swaps = Swaps(pool, host, AtOnce())
    run(swaps, step_of(out=[(0, 3), (4, 1)], back=[(3, 5)]))
    assert torch.equal(host[:, :, [3, 1]], before[:, :, [0, 4]])
    assert torch.equal(pool[:, :, 5], before[:, :, 0])
    assert torch.equal(pool[:, :, :5], before[:, :, :5])


def test_staged_copies_move_what_plain_ones_do(pool: torch.Tensor) -> None:
    """As between a GPU and host memory in which a block lies in one piece."""
    expected, host = torch.zeros(POOL), torch.zeros(6, *POOL[:2], *POOL[3:]).movedim(0, 2)
    swap_blocks(pool, expected, [(5, 0), (1, 4)])
    take_out(pool, host, [5, 1], [0, 4])
    assert host[:, :, 4].is_contiguous()
    assert torch.equal(host, expected)
    target = torch.zeros(POOL)
    bring_in(host, target, [4, 0], [2, 3])
    assert torch.equal(target[:, :, [2, 3]], pool[:, :, [1, 5]])
    assert not target[:, :, [0, 1, 4, 5]].any()


def test_a_swap_out_overlaps_the_step_that_is_running(swaps: Swaps, ledger: Ledger) -> None:
    for _ in range(3):
        run(swaps, step_of([0, 1]))
    run(swaps, step_of([0, 1, 2], out=[(2, 0)]))
    assert ledger.after == [2]
    assert ledger.waited == ["move 1"]


def test_a_swap_in_overlaps_it_unless_it_uses_the_block(swaps: Swaps, ledger: Ledger) -> None:
    for _ in range(2):
        run(swaps, step_of([0, 1]))
    run(swaps, step_of([0, 1, 2], back=[(0, 2)]))
    assert ledger.after == [1]
    run(swaps, step_of([3], back=[(0, 2)]))
    assert ledger.after == [1, 4]
    run(swaps, step_of([5], back=[(0, 4)], copies=[(1, 4)]))
    assert ledger.after == [1, 4, 6]
    assert ledger.waited == ["move 1", "move 2", "move 3"]


def test_the_first_moves_of_an_epoch_wait_for_the_last_one(swaps: Swaps, ledger: Ledger) -> None:
    for _ in range(3):
        run(swaps, step_of([0, 1]))
    swaps.reset()
    run(swaps, step_of([4], out=[(2, 0)], back=[(0, 4)]))
    assert ledger.after == [4, 5]
