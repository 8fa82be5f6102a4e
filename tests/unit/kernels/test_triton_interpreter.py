"""Runs the tests of the Triton kernels in Triton's interpreter.

Triton decides at import whether its functions are compiled or interpreted, so the tests that need
no GPU have a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("it would run itself", allow_module_level=True)

HERE = Path(__file__).parent
MODULES = ["attention", "cache", "fp8", "matmul", "norm", "sampling"]


def run_interpreted(marker: str) -> None:
    tests = [str(HERE / f"test_triton_{module}.py") for module in MODULES]
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, *tests]
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


def test_kernels_are_right_in_the_interpreter():
    run_interpreted("not slow")


@pytest.mark.slow
def test_kernels_are_right_in_the_interpreter_at_length():
    run_interpreted("slow")
