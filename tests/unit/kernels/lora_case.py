"""Random adapters of a layer, for the tests of every kernel."""

import random

import torch
from torch import Tensor

from pagefleet_kernels.lora import Factors

PARTS = {
    "one": (100,),
    "heads": (96, 48, 48),
    "narrow heads": (40, 24, 24),
    "gates": (96, 96),
}
"""Outputs of the matrices that a layer is stacked of."""


def random_loras(
    parts: tuple[int, ...], inputs: int, count: int, dtype: torch.dtype
) -> list[list[Factors]]:
    """Adapters of any ranks, of which the first changes something."""
    loras = []
    for number in range(count):
        factors, first = [], 0
        for outputs in parts:
            rank = random.choice([1, 3, 8, 16, 17, 40] if number == 0 else [0, 1, 6, 16, 33])
            if rank:
                down = (torch.randn(rank, inputs) / inputs**0.5).to(dtype)
                up = (torch.randn(outputs, rank) / rank**0.5).to(dtype)
                factors.append(Factors(first, down, up, random.uniform(0.1, 3)))
            first += outputs
        loras.append(factors)
    return loras


def random_adapters(count: int, rows: int) -> Tensor:
    """A number for each row: in a random order, or in runs, as the worker lays them out."""
    adapters = torch.randint(count + 1, (rows,), dtype=torch.int32)
    return adapters.sort().values if random.random() < 0.5 else adapters
