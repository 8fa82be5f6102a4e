"""Are the Triton kernels right on this device? Each is compared with `reference` in float64.

Inputs are random, blocks lie in random order, and memory that no kernel may read holds NaN. An
error is the largest of |found - expected| / (1 + |expected|); what must be equal to the bit is
allowed 0. Import this after `TRITON_INTERPRET` is set, where it is to be set.
"""

from collections.abc import Iterator
from functools import partial

import torch
from triton.runtime.errors import TritonError

from benchmarks.correctness import attention, layers, sampling
from benchmarks.correctness.comparison import Check, Inputs

FAILURES = (RuntimeError, TritonError)
"""What a compiler, a launch or a device raises."""

_GROUPS = {"attention": attention, "layers": layers, "sampling": sampling}


def _quick(inputs: Inputs) -> Iterator[partial[Check]]:
    for group in _GROUPS.values():
        yield from group.quick(inputs)


def checks(device: torch.device, seed: int, *, quick: bool, group: str = "") -> Iterator[Check]:
    """Run every kernel, or those of one group; quick is what an interpreter does in seconds.

    A check that cannot be done is one that failed, with the reason as its case.
    """
    inputs = Inputs(device, seed)
    for run in _quick(inputs) if quick else _GROUPS[group].full(inputs):
        try:
            yield run()
        except FAILURES as error:
            yield Check(run.func.__name__.strip("_"), reason(error), torch.inf, 0.0)


def reason(error: Exception) -> str:
    """The first line of an error's text, as a cell of a table."""
    return f"{error} ".splitlines()[0].replace("|", "/")
