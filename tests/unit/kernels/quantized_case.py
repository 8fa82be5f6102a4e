"""Random matrices of a few bits."""

import torch

from pagefleet_kernels.quantized import GROUP, Quantized

FLOATS = 4.0
"""In the place of the bits of a number: floats of four."""


def random_matrix(bits: float, outputs: int, inputs: int) -> Quantized:
    """Weights of about 1 / sqrt(inputs)."""
    if bits == 8:
        return Quantized.of(torch.randn(outputs, inputs) / inputs**0.5)
    scales, minimums = torch.rand(2, outputs, inputs // GROUP) / inputs**0.5
    numbers = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
    if isinstance(bits, float):
        return Quantized(numbers, (scales / 4).half(), floats=True)
    return Quantized(numbers, (scales / 4).half(), (-2 * minimums).half())
