import os
import signal
import subprocess
import sys

from pagefleet import tether


def run(parent, *command):
    return subprocess.run(
        [sys.executable, tether.__file__, str(parent), *command],
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_becomes_the_command():
    command = tether.tethered([sys.executable, "-c", "import os; print(os.getppid())"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{os.getpid()}\n")


def test_it_dies_if_its_parent_was_gone_before_it_was_tethered():
    done = run(os.getppid(), sys.executable, "-c", "print('alive')")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_command_that_does_not_exist_is_named():
    done = run(os.getpid(), "/no/such/program")
    assert done.returncode != 0
    assert "No such file or directory" in done.stderr
