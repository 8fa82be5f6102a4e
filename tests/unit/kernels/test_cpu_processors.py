"""Runs the tests of the CPU kernels as they are compiled for lesser processors than this one."""

import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

from tests.processes import run_tests

BASELINE = ["64bit", "cx8", "fxsr", "mmx", "sse", "sse2"]
AVX2 = [
    *BASELINE,
    *["cx16", "popcnt", "sahf", "sse3", "ssse3", "sse4.1", "sse4.2"],
    *["avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"],
]
AVX512 = [*AVX2, *["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]]
PROCESSORS = {
    "x86-64": BASELINE,
    "haswell": AVX2,
    "skylake-avx512": AVX512,
    "icelake-server": [*AVX512, "avx512vnni", "avx512vbmi"],
}
"""What they can do of all that kernels ask for, by the names that LLVM has for both."""

HERE = Path(__file__).parent
PRODUCTS = [str(HERE / "test_quantized.py")]


def run_as_on(name: str, *arguments: str) -> None:
    """Run tests with kernels for that processor, or skip where this one lacks what it can do."""
    here = binding.get_host_cpu_features()
    if not all(here.get(feature) for feature in PROCESSORS[name]):
        pytest.skip("this processor cannot")
    features = ",".join(f"+{feature}" for feature in PROCESSORS[name])
    environment = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    told = "from pagefleet_kernels.cpu_ir import FEATURES; print(*FEATURES)"
    found = subprocess.run(
        [sys.executable, "-c", told],
        env=environment | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(found.stdout.split()) == set(PROCESSORS[name])
    run_tests(*arguments, **environment)


def test_products_are_right_without_avx512() -> None:
    run_as_on("haswell", "-m", "not slow", *PRODUCTS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROCESSORS)
def test_kernels_are_right_on_other_processors(name: str) -> None:
    others = [str(path) for path in HERE.glob("test_cpu_*.py") if path != Path(__file__)]
    run_as_on(name, "-m", "not slow", *others, *PRODUCTS)
