"""`triton.jit` with a type, and whether its kernels are interpreted."""

from collections.abc import Callable
from typing import Any

import triton

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 at import)."""

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""Compiles a function on its first launch, `kernel[grid](arguments)`."""
