import os
import signal
import subprocess
import sys

import pytest

DYING = """
import ctypes, os

def test_it():
    os.write(2, b"Assertion failed: not that again\\n")
    ctypes.CDLL(None).abort()
"""


@pytest.mark.parametrize("options", [[], ["--numprocesses=1", "--max-worker-restart=0"]])
def test_a_session_that_aborts_says_where_and_why(tmp_path, options):
    (tmp_path / "test_dying.py").write_text(DYING)
    died = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.last_words", *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert died.returncode == (1 if options else -signal.SIGABRT)
    said = "pytest died in test_dying.py::test_it\nAssertion failed: not that again"
    assert said in died.stderr
