"""What the GPU path does on this machine, in one run of less than 8 minutes.

    python -m benchmarks.gpu_check [--quick]

Needs one NVIDIA GPU with torch 2.11, triton 3.6 or newer, and no network. Where the project is not
installed, PYTHONPATH=shared:kernels:services is enough beside msgspec, safetensors and tokenizers.

First every kernel against float64; then decode attention beside a measured copy, prefill attention
beside a measured matrix product, and sampling; then whole steps of a worker, with random weights of
an 8B model, beside the limit of such a step: weights, keys and values read once, at the rates
measured in the same run. Without a GPU the kernels run in Triton's interpreter, and nothing is
timed.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator
from itertools import chain

import torch


def check_kernels(device: torch.device, seed: int, *, quick: bool) -> Iterator[tuple[bool, str]]:
    """Whether each kernel is right, and a line that says so."""
    from benchmarks.gpu_correctness import checks

    for check in checks(device, seed, quick=quick):
        verdict = "ok" if check.passed else "WRONG"
        figures = f"{check.error:.1e} | {check.allowed:.1e} | | | {verdict} |"
        yield check.passed, f"| {check.kernel} | {check.case} | {figures}"


def measure(device: torch.device, *, quick: bool) -> Iterator[tuple[bool, str]]:
    """The lines of everything that is timed, and whether it could be: no part ends the others."""
    from benchmarks.gpu_correctness import FAILURES, reason
    from benchmarks.gpu_rates import (
        copy_rate,
        decode_figures,
        prefill_figures,
        product_rate,
        sample_figures,
    )
    from benchmarks.gpu_step import step_parts

    copy, product = copy_rate(device), product_rate(device)
    yield True, f"| copy | 4 GiB | {copy / 1e9:.0f} GB/s | | | | |"
    yield True, f"| matrix product | 8192 cubed, bfloat16 | {product / 1e12:.0f} TFLOP/s | | | | |"
    kernels = [
        ("decode", decode_figures(device, copy)),
        ("prefill", prefill_figures(device, product)),
        ("sample", sample_figures(device, copy)),
        ("decode, fp8", decode_figures(device, copy, eight_bits=True)),
    ]
    parts = kernels[:3] if quick else chain(kernels, step_parts(device, copy, product))
    for name, figures in parts:
        try:
            for each in figures:
                yield True, each.line
        except FAILURES as error:
            yield False, f"| {name} | {reason(error)} | | | | | FAILED |"


def main() -> int:
    """Print one table; the status is 1 if a kernel is wrong, or something could not be done."""
    parser = argparse.ArgumentParser(description="Checks and times the GPU path.")
    parser.add_argument("--quick", action="store_true", help="few cases, and no worker")
    options = parser.parse_args()
    began, seed = time.perf_counter(), random.SystemRandom().randrange(2**31)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        device = torch.device("cuda", torch.cuda.current_device())
        print(f"{torch.cuda.get_device_name(device)}, ", end="")
    else:
        device = torch.device("cpu")
        os.environ["TRITON_INTERPRET"] = "1"
        print("No GPU: Triton's interpreter, ", end="")
    print(f"torch {torch.__version__}, seed {seed}\n")
    print("| part | case | found | limit | share | goal | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    right = True
    for passed, line in check_kernels(device, seed, quick=options.quick or not on_gpu):
        right &= passed
        print(line, flush=True)
    if on_gpu:
        for passed, line in measure(device, quick=options.quick):
            right &= passed
            print(line, flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s.")
    if not on_gpu:
        print("Not measured: decode and prefill attention, and the worker's steps need a GPU.")
    elif options.quick:
        print("Not measured: the worker's steps (--quick).")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
