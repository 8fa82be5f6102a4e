"""Random matrices of a few bits."""

import torch

from pagefleet_kernels.quantized import E4M3_GROUP, GROUP, Kind, Quantized

HOST_KINDS = (Kind.INT8, Kind.INT4, Kind.E2M1)
"""That a CPU multiplies."""


def random_matrix(kind: Kind, outputs: int, inputs: int) -> Quantized:
    """Weights of about 1 / sqrt(inputs)."""
    if kind is Kind.INT8:
        return Quantized.of(torch.randn(outputs, inputs) / inputs**0.5)
    if kind is Kind.E4M3:
        numbers = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        return Quantized(numbers, torch.rand(outputs, -(-inputs // E4M3_GROUP)) / inputs**0.5)
    scales, minimums = torch.rand(2, outputs, inputs // GROUP) / inputs**0.5
    numbers = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
    if kind is Kind.E2M1:
        return Quantized(numbers, (scales / 4).half(), floats=True)
    return Quantized(numbers, (scales / 4).half(), (-2 * minimums).half())
