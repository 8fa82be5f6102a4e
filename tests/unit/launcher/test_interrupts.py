"""SIGHUP means two things: somebody wants all processes replaced, or the terminal was closed."""

import os
import signal
import sys

import pytest

from tests.unit.launcher.conftest import wait_until

TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
"""What a shell does for the session it begins: standard input becomes its terminal."""


@pytest.fixture
def terminal():
    """Its two ends; a test may close the first, as an emulator does."""
    ends = os.openpty()
    yield ends
    os.close(ends[1])


def in_terminal(*command):
    run = TAKE_TERMINAL + "os.execvp(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", run, *command]


def is_replaced(cell, count):
    cell.wait_for("worker", "ended", count=count)
    wait_until(lambda: len(cell.alive()) == 1)


def test_somebody_asks_while_the_terminal_is_there(cell, terminal):
    cell.start({"worker": "serve"}, wrapper=in_terminal(), stdin=terminal[1])
    cell.signal(signal.SIGHUP)
    is_replaced(cell, 1)
    os.close(terminal[0])
    assert cell.end()[0] == 0


def test_a_terminal_that_is_closed_drains(cell, terminal):
    cell.start({"worker": "serve"}, wrapper=in_terminal(), stdin=terminal[1])
    os.close(terminal[0])
    assert cell.end()[0] == 0
    assert len(cell.events("worker", "started")) == 1


def test_nohup_outlives_its_terminal_and_can_be_asked_later(cell, terminal):
    cell.start({"worker": "serve"}, wrapper=in_terminal("nohup"), stdin=terminal[1])
    os.close(terminal[0])

    def is_replaced_when_asked():
        cell.signal(signal.SIGHUP)
        return cell.events("worker", "ended")

    wait_until(is_replaced_when_asked)
    cell.signal()
    assert cell.end()[0] == 0


def test_a_service_without_a_terminal_is_asked(cell):
    cell.start({"worker": "serve"}, wrapper=["env"])
    cell.signal(signal.SIGHUP)
    is_replaced(cell, 1)
