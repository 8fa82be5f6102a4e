"""Which kernels a worker runs: one place that looks at the device, so that no model has to."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet_kernels import reference


@dataclass(frozen=True)
class Kernels:
    """The operations of one device; each has the signature and the meaning of its namesake in
    `reference`.
    """

    name: str
    attention: Callable[..., Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    copy_blocks: Callable[[Tensor, Tensor], None]


REFERENCE = Kernels(
    "reference", reference.attention, reference.write_kv, reference.copy_blocks
)


def select(device: torch.device) -> Kernels:
    """The fastest kernels that run on `device`."""
    if device.type == "cuda":
        from pagefleet_kernels import triton_attention, triton_cache

        return Kernels(
            "triton", triton_attention.attention, triton_cache.write_kv, triton_cache.copy_blocks
        )
    return REFERENCE
