"""Compiled ahead of time, the Triton kernels fit the chips: no spills, shared memory within limits,
matrix products on the matrix units.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.triton_resources import MACHINES

ROOT = Path(__file__).parents[3]
MULTIPLYING = (
    "attention_kernel",
    "product_kernel",
    "quantized_product_kernel",
    "shrink_kernel",
    "expand_kernel",
    "expert_kernel",
    "heads_kernel",
)


def check_report(target: str, case: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    script = "benchmarks.triton_resources"
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-m", script, target, "--case", case],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(finished.stdout)
    assert finished.returncode == 0, finished.stderr
    lines = [line for line in finished.stdout.splitlines() if target in line]
    assert lines
    for line in lines:
        kernel, spills, shared, matrix = (line.split(" | ")[column] for column in (1, 5, 6, 7))
        assert spills == "0", line
        assert int(shared) <= MACHINES[target].shared_limit, line
        if "float32" not in line:
            assert (matrix != "- |") == (kernel in MULTIPLYING), line
        if line.startswith("| 8B prefill | attention_kernel"):
            assert matrix == f"{MACHINES[target].matrix_instructions[0]} |"


def test_decode_fits_a_hopper_chip():
    check_report("cuda:90", "135M decode")


def test_latents_fit_it():
    check_report("cuda:90", "DeepSeek-V2-Lite decode")
    check_report("cuda:90", "DeepSeek-V3 latents")


def test_few_bits_fit_it():
    check_report("cuda:90", "8B output, 4 bits, decode")


def test_experts_fit_it():
    check_report("cuda:90", "30B-A3B experts, decode")


def test_float32_fits_it_too():
    check_report("cuda:90", "float32 prefill")


@pytest.mark.slow
@pytest.mark.parametrize("target", MACHINES)
def test_every_kernel_fits_every_chip(target):
    check_report(target, "")
