"""How long a step takes on a GPU that is not there: cost models for the simulated engine.

A row with one input token is a decode, one with more a prefill (or a part of one). The weights are
read once a step, the cells of all positions before a row's end once each.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Protocol


class Work(Protocol):
    """What the cost of a row depends on; `slots.Row` is one."""

    @property
    def tokens(self) -> Sized:
        """Its input tokens."""
        ...

    @property
    def end(self) -> int:
        """Position after the last of them."""
        ...


@dataclass(frozen=True)
class Roofline:
    """What must be moved and computed, over what a GPU can move and compute.

    The values are those of OPT-13B in float16 on an A100-40G (Kwon and others, "Efficient memory
    management for large language model serving with PagedAttention", SOSP 2023, section 6.1); the
    shares that are reached, and the costs beside them, are partly fitted to its figure 13.
    """

    parameters: float = 13e9
    weight_bytes: float = 26e9
    cell_bytes: float = 2 * 40 * 5120 * 2
    """Keys and values of one position: 40 layers of 5,120 in float16."""
    bandwidth: float = 1.555e12
    """Bytes a second."""
    compute: float = 312e12
    """Floating-point operations a second."""
    weight_share: float = 0.70
    """Of the bandwidth, while weights are read."""
    cell_share: float = 0.55
    """Of the bandwidth, while cells are read."""
    compute_share: float = 0.5
    step_seconds: float = 1e-3
    sequence_seconds: float = 0.3e-3

    def __call__(self, rows: Sequence[Work]) -> float:
        """Seconds that a step of these rows takes."""
        prefill = sum(len(row.tokens) for row in rows if len(row.tokens) > 1)
        cells = sum(row.end for row in rows)
        return (
            self.step_seconds
            + self.weight_bytes / (self.bandwidth * self.weight_share)
            + cells * self.cell_bytes / (self.bandwidth * self.cell_share)
            + 2 * self.parameters * prefill / (self.compute * self.compute_share)
            + self.sequence_seconds * len(rows)
        )


def distserve_opt_13b(rows: Sequence[Work]) -> float:
    """Seconds that a step takes on an A100-80G with OPT-13B, as DistServe fitted it (Zhong and
    others, OSDI 2024; the constants are those of its published simulator).

    Prefill and decode have a fit each; a step of both takes the sum.
    """
    prefills = [len(row.tokens) for row in rows if len(row.tokens) > 1]
    contexts = [row.end for row in rows if len(row.tokens) == 1]
    milliseconds = 0.0
    if prefills:
        squares = sum(count * count for count in prefills)
        milliseconds += 22.05 + 0.1405 * sum(prefills) + 8.08e-6 * squares
    if contexts:
        batch = len(contexts)
        base, each_token, each_row = (
            (23.475, 5.929e-4, 0.0607) if batch < 95 else (20.206, 4.908e-4, 0.120)
        )
        milliseconds += base + each_token * sum(contexts) + each_row * batch
    return milliseconds * 1e-3
