"""A child that gives no sign of life any more is killed, and started again once it is gone."""

import os
import signal
import time

import pytest

from benchmarks.drill.processes import is_alive
from tests.unit.launcher.conftest import wait_until

LIMIT = 1.0


def beating(cell, limit=LIMIT):
    cell.start({"scheduler": "serve"}, {"worker": "silent"}, hang_timeout=limit)
    return cell.wait_for("scheduler", "started")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1])
def test_a_child_that_hangs_is_replaced(cell, number):
    """Stopped as a whole, or only stuck in its loop."""
    first = beating(cell)
    began = time.monotonic()
    os.kill(first.pid, number)
    second = cell.wait_for("scheduler", "started", count=2)
    assert LIMIT <= second.time - began < 10 * LIMIT
    assert not is_alive(first.pid)
    assert len(cell.events("worker", "started")) == 1
    cell.signal()
    status, errors = cell.end()
    assert status == 0
    assert "serve | scheduler hangs: no sign of life for 1 s" in errors
    assert "scheduler was killed by SIGKILL; it starts again in 0.2 s" in errors


def test_a_child_that_stops_for_less_than_the_limit_is_left_alone(cell):
    """So is one that never gave a sign of life: it may still be loading a model."""
    limit = 3 * LIMIT  # a busy machine stops it too
    first = beating(cell, limit)
    for _ in range(3):
        os.kill(first.pid, signal.SIGSTOP)
        time.sleep(limit / 4)
        os.kill(first.pid, signal.SIGCONT)
        time.sleep(LIMIT / 4)
    assert [event.what for event in cell.events()] == ["started", "started"]


def test_nobody_is_blamed_for_what_the_supervisor_slept_through(cell):
    first = beating(cell)
    cell.signal(signal.SIGSTOP)
    time.sleep(2 * LIMIT)
    cell.signal(signal.SIGCONT)
    time.sleep(LIMIT / 2)
    assert is_alive(first.pid)


def test_the_end_of_a_child_closes_what_was_opened_for_it(cell):
    """However often it starts again."""
    cell.start({"worker": "crash"})
    cell.wait_for("worker", "started", count=2)
    wait_until(lambda: not cell.alive())
    open_files = len(os.listdir(f"/proc/{cell.process.pid}/fd"))
    cell.wait_for("worker", "started", count=4)
    wait_until(lambda: not cell.alive())
    wait_until(lambda: len(os.listdir(f"/proc/{cell.process.pid}/fd")) <= open_files)
