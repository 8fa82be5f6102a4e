"""Runs the other tests of this folder in Triton's interpreter where there is no GPU."""

import os
from pathlib import Path

import pytest
import torch

from tests.processes import run_interpreted

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("it would run itself", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the others run on the GPU", allow_module_level=True)

HERE = Path(__file__).parent


@pytest.mark.timeout(900)
def test_what_a_gpu_does_without_a_gpu():
    run_interpreted("-m", "not slow", str(HERE))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_what_a_gpu_does_without_a_gpu_at_length():
    run_interpreted("-m", "slow", str(HERE))
