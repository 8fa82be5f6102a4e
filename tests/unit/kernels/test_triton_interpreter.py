"""Runs the tests of the Triton kernels in Triton's interpreter.

Triton decides at import whether its functions are compiled or interpreted, so the tests that need
no GPU have a process of their own.
"""

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("it would run itself", allow_module_level=True)

HERE = Path(__file__).parent
MODULES = ["attention", "cache", "fp8", "matmul", "norm", "sampling"]
TESTS = [str(HERE / f"test_triton_{module}.py") for module in MODULES]


@pytest.mark.early("pytest", "-q", "-m", "not slow", *TESTS, TRITON_INTERPRET="1")
def test_kernels_are_right_in_the_interpreter(early):
    print(early.stdout)
    assert early.returncode == 0, early.stdout + early.stderr


@pytest.mark.slow
@pytest.mark.early("pytest", "-q", "-m", "slow", *TESTS, TRITON_INTERPRET="1")
def test_kernels_are_right_in_the_interpreter_at_length(early):
    print(early.stdout)
    assert early.returncode == 0, early.stdout + early.stderr
