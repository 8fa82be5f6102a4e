"""Runs the tests of the Triton kernels in Triton's interpreter."""

import os
from pathlib import Path

import pytest

from tests.processes import run_interpreted

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("it would run itself", allow_module_level=True)

HERE = Path(__file__).parent
MODULES = [
    "attention",
    "cache",
    "experts",
    "fp8",
    "latents",
    "lora",
    "matmul",
    "norm",
    "quantized",
    "sampling",
]
TESTS = [str(HERE / f"test_triton_{module}.py") for module in MODULES]


def test_kernels_are_right_in_the_interpreter():
    run_interpreted("-m", "not slow", *TESTS)


@pytest.mark.slow
def test_kernels_are_right_in_the_interpreter_at_length():
    run_interpreted("-m", "slow", *TESTS)
