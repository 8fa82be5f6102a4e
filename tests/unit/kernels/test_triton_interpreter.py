"""Runs the tests of the Triton kernels in Triton's interpreter.

Triton decides at import whether its functions are compiled or interpreted, so the tests that need
no GPU have a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = ["attention"]


def run_interpreted(module: str, marker: str) -> None:
    tests = HERE / f"test_triton_{module}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, str(tests)]
    finished = subprocess.run(
        command,
        cwd=HERE.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="it would run itself")
@pytest.mark.parametrize("module", MODULES)
def test_kernels_are_right_in_the_interpreter(module):
    run_interpreted(module, "not slow")
