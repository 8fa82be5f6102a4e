"""A process ends at once and says why, whatever still waits in it."""

import subprocess
import sys

import pytest

_PROGRAM = """
import os, signal, sys, threading
from pagefleet_worker.__main__ import end_with_rank
from pagefleet_worker.ending import run_to_end

threading.Thread(target=threading.Event().wait).start()  # an interpreter would wait for it
print("said", end="")
def main():
    {main}
run_to_end(main)
"""


@pytest.mark.parametrize(
    ("main", "status", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("raise RuntimeError('no way')", 1, "RuntimeError: no way"),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, ""),
        ("end_with_rank(1, 2)", 2, "its rank 1 ended with status 2"),
        ("end_with_rank(1, -9)", 1, "its rank 1 ended with status -9"),
    ],
)
def test_a_process_ends_by_its_outcome(main: str, status: int, said: str) -> None:
    command = [sys.executable, "-c", _PROGRAM.format(main=main)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (status, "said")
    assert said in ended.stderr
    assert bool(said) == bool(ended.stderr)
