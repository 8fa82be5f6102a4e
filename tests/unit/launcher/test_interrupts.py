"""What signals mean to the launcher. SIGHUP means two things: somebody wants all processes
replaced, or the terminal was closed.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagefleet_worker.prepare import prepare
from tests.processes import killed_in_the_end
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


OUTLIVE = """
import asyncio, os, signal
from pagefleet_launcher.interrupts import Interrupts
async def run():
    Interrupts()
asyncio.run(run())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    os.kill(os.getpid(), number)
print("to its end")
"""


def test_nothing_interrupts_what_is_left_when_all_has_ended():
    ended = subprocess.run([sys.executable, "-c", OUTLIVE], capture_output=True, check=True)
    assert ended.stdout == b"to its end\n"


def test_an_end_that_is_asked_for_while_a_model_is_prepared(tmp_path):
    folder = prepare("echo", tmp_path / "pagefleet")
    shutil.rmtree(folder)
    command = [str(Path(sys.executable).parent / "pagefleet"), "serve", "--model=echo", "--port=0"]
    with folder.with_name(f".{folder.name}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ours = f":{os.fstat(lock.fileno()).st_ino} "
        with killed_in_the_end(
            subprocess.Popen(command, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)})
        ) as serving:
            wait_until(lambda: count_locks(ours) == 2)
            serving.terminate()
            assert serving.wait(60) == 0
            assert count_locks(ours) == 1


def count_locks(inode):
    """Of those who have it and those who wait."""
    return sum(inode in line for line in Path("/proc/locks").read_text().splitlines())
