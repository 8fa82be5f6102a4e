"""SIGHUP puts a successor in every child's place, one by one."""

import signal

import pytest

from benchmarks.drill.processes import is_alive
from tests.unit.launcher.conftest import wait_until

REPLACED = ["started", "asked", "ended"]


def test_each_ends_when_its_successor_is_ready(cell):
    services = ["scheduler", "worker", "gateway"]
    cell.start(*({name: "serve"} for name in services))
    cell.signal(signal.SIGHUP)
    cell.wait_for("gateway", "ended")
    happened = [(event.name, event.what) for event in cell.events()]
    assert happened[3:] == [(name, what) for name in services for what in REPLACED]
    wait_until(lambda: len(cell.alive()) == 3)
    cell.signal()
    status, errors = cell.end()
    assert status == 0
    assert "serve | all processes are replaced" in errors


def test_one_that_needs_the_same_address_starts_when_its_predecessor_has_ended(cell):
    cell.start({"scheduler": "serve"}, overlaps=False)
    cell.signal(signal.SIGHUP)
    cell.wait_for("scheduler", "started", count=2)
    assert [e.what for e in cell.events()] == ["started", "asked", "ended", "started"]


@pytest.mark.parametrize("status", [2, 3])
def test_a_successor_that_fails_is_given_up(cell, status):
    """It refuses its settings, or crashes: what served before goes on serving."""
    cell.start({"worker": f"once:{status}"}, {"gateway": "serve"})
    cell.signal(signal.SIGHUP)
    cell.wait_for("gateway", "ended")
    wait_until(lambda: len(cell.alive()) == 2)
    assert len(cell.events("worker", "started")) == 2
    assert is_alive(cell.events("worker", "started")[0].pid)
    cell.signal()
    status, errors = cell.end()
    assert status == 0
    assert "serve | the new worker did not become ready; the old one stays" in errors
    assert "all processes are replaced" not in errors


def test_it_can_be_done_again(cell):
    cell.start({"worker": "serve"})
    for count in (2, 3):
        cell.signal(signal.SIGHUP)
        cell.wait_for("worker", "ended", count=count - 1)
        wait_until(lambda: len(cell.alive()) == 1)
    assert len(cell.events("worker", "started")) == 3


def test_a_predecessor_that_does_not_end_is_killed(cell):
    cell.start({"worker": "stubborn"}, drain_timeout=0.3)
    first = cell.wait_for("worker", "started")
    cell.signal(signal.SIGHUP)
    wait_until(lambda: not is_alive(first.pid))
    assert len(cell.alive()) == 1


def test_an_end_that_is_asked_for_meanwhile_ends_all(cell):
    cell.start({"worker": "stubborn"}, {"gateway": "serve"}, drain_timeout=1.0)
    cell.signal(signal.SIGHUP)
    cell.wait_for("worker", "asked")
    cell.signal(signal.SIGTERM)
    assert cell.end()[0] == 1
    assert not cell.alive()


def test_an_end_that_is_asked_for_while_a_killed_one_is_buried_ends_all(cell):
    cell.start({"worker": "haunted"}, drain_timeout=0.3)
    first = cell.wait_for("worker", "started")
    cell.signal(signal.SIGHUP)
    wait_until(lambda: not is_alive(first.pid))
    cell.signal(signal.SIGTERM)
    status, errors = cell.end()
    assert status == 1
    assert "Traceback" not in errors
    assert not cell.alive()
