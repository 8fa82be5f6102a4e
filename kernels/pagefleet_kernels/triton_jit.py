"""`triton.jit` with a type, and whether its kernels are interpreted."""

import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 at import)."""

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""Compiles a function on its first launch, `kernel[grid](arguments)`."""


def jit_once_for(*arguments: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit` of a kernel that is the same whatever these arguments are.

    Others are compiled again for integers that are 1 or multiples of 16, and for pointers that are
    aligned to 16 bytes. What changes from step to step would bring each kind in the midst of
    serving, and a compilation takes seconds.
    """
    jitted: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=arguments)
    return jitted


def source_digest() -> str:
    """What tells these kernels from those of another version, compiler included."""
    digest = hashlib.sha256(triton.__version__.encode())
    folder = pathlib.Path(__file__).parent
    for source in (*sorted(folder.glob("triton_*.py")), folder / "quantized.py"):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:8]
