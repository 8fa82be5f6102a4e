"""What the GPU path does on this machine, in one run of less than 8 minutes.

    python -m benchmarks.gpu_check [--quick] [--seconds 450]

Needs one NVIDIA GPU with torch 2.11, triton 3.6 or newer, and no network. Where the project is not
installed, PYTHONPATH=shared:kernels:services is enough beside msgspec and safetensors, which only
the worker's steps need.

First every kernel against float64; then decode attention beside a measured copy, prefill attention
beside a measured matrix product, products with weights of 4 and 8 bits and mixtures of experts
beside both, and sampling; then whole steps of a worker, with random weights of an 8B model, beside
the limit of such a step: weights, keys and values read once, at the rates measured in the same
process. Without a GPU the kernels run in Triton's interpreter, and nothing is timed.

Every part is a process of its own that prints its lines as they come: a kernel that loses the
device, a compiler that dies or hangs costs a part, and what was printed stays.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import torch

CHECKS = ("attention", "layers", "sampling")
RATES = ("decode", "prefill", "products", "experts", "sample")
SLOW = ("step, graphs on", "step, graphs off", "step, invariant", "decode, fp8")

LONGEST = 100.0
"""Seconds that a part may take."""

LEAST = 15.0
"""Seconds for which no part is begun."""

WRONG = 3
"""Status of a part in which something is wrong, or could not be done."""


def check_kernels(
    device: torch.device, seed: int, *, quick: bool, group: str = ""
) -> Iterator[tuple[bool, str]]:
    """Whether each kernel is right, and a line that says so."""
    from benchmarks.gpu_correctness import checks

    for check in checks(device, seed, quick=quick, group=group):
        verdict = "ok" if check.passed else "WRONG"
        figures = f"{check.error:.1e} | {check.allowed:.1e} | | | {verdict} |"
        yield check.passed, f"| {check.kernel} | {check.case} | {figures}"


def measure(device: torch.device, part: str) -> Iterator[tuple[bool, str]]:
    """The lines of a part that is timed, and whether it could be."""
    from benchmarks import gpu_rates
    from benchmarks.gpu_correctness import FAILURES, reason

    try:
        copy, product = gpu_rates.copy_rate(device), gpu_rates.product_rate(device)
        if part == "decode":
            yield True, f"| copy | 4 GiB | {copy / 1e9:.0f} GB/s | | | | |"
            figures = gpu_rates.decode_figures(device, copy)
        elif part == "decode, fp8":
            figures = gpu_rates.decode_figures(device, copy, eight_bits=True)
        elif part == "prefill":
            rate = f"{product / 1e12:.0f} TFLOP/s"
            yield True, f"| matrix product | 8192 cubed, bfloat16 | {rate} | | | | |"
            figures = gpu_rates.prefill_figures(device, product)
        elif part == "products":
            figures = gpu_rates.quantized_figures(device, copy, product)
        elif part == "experts":
            figures = gpu_rates.expert_figures(device, copy, product)
        elif part == "sample":
            figures = gpu_rates.sample_figures(device, copy)
        else:
            from benchmarks.gpu_step import step_figures

            figures = step_figures(device, part.removeprefix("step, "), copy, product)
        for each in figures:
            yield True, each.line
    except FAILURES as error:
        yield False, f"| {part} | {reason(error)} | | | | | FAILED |"


def run_part(part: str, seed: int, *, quick: bool) -> int:
    """Print the lines of one part; its status."""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device, quick = torch.device("cpu"), True
        os.environ["TRITON_INTERPRET"] = "1"
    if part in CHECKS:
        lines = check_kernels(device, seed, quick=quick, group="" if quick else part)
    else:
        lines = measure(device, part)
    right = True
    for passed, line in lines:
        right &= passed
        print(line, flush=True)
    return 0 if right else WRONG


def run_parts(parts: Sequence[str], arguments: Sequence[str], seconds: float) -> bool:
    """Let processes do the parts, one after another; whether all is right."""
    end, right = time.monotonic() + seconds, True
    for part in parts:
        limit = min(LONGEST, end - time.monotonic())
        failure = ""
        if limit < LEAST:
            failure = "no time is left"
        else:
            command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", part, *arguments]
            try:
                status = subprocess.run(command, timeout=limit, check=False).returncode
            except subprocess.TimeoutExpired:
                failure = f"took longer than {limit:.0f} s"
            else:
                right &= status == 0
                failure = "" if status in (0, WRONG) else f"ended with status {status}"
        if failure:
            right = False
            print(f"| {part} | {failure} | | | | | FAILED |", flush=True)
    return right


def main() -> int:
    """Print one table; the status is 1 if a kernel is wrong, or something could not be done."""
    parser = argparse.ArgumentParser(description="Checks and times the GPU path.")
    parser.add_argument("--quick", action="store_true", help="few cases, and no worker")
    parser.add_argument("--seconds", type=float, default=450, help="after which no part goes on")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--part", choices=[*CHECKS, *RATES, *SLOW], help="only this one")
    options = parser.parse_args()
    if options.part is not None:
        return run_part(options.part, options.seed, quick=options.quick)
    began, on_gpu = time.perf_counter(), torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else "No GPU: Triton's interpreter"
    print(f"{name}, torch {torch.__version__}, seed {options.seed}\n")
    print("| part | case | found | limit | share | goal | |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    quick = options.quick or not on_gpu
    parts = [*(CHECKS[:1] if quick else CHECKS), *(RATES if on_gpu else ())]
    parts += SLOW if on_gpu and not quick else ()
    arguments = [f"--seed={options.seed}", *(["--quick"] if quick else [])]
    right = run_parts(parts, arguments, options.seconds)
    print(f"\n{time.perf_counter() - began:.0f} s.")
    if not on_gpu:
        print("Not measured: decode and prefill attention, and the worker's steps need a GPU.")
    elif options.quick:
        print("Not measured: the worker's steps (--quick).")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
