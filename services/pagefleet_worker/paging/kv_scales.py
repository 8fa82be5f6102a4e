"""The scales of keys and values of 8 bits: one for each head of each layer, found at start.

A step over random tokens shows how large a head's keys and values get; its scale is the power of
two that leaves them `HEADROOM` below the largest e4m3. Powers of two cost no rounding, and workers
that compute almost the same bits find the same ones.
"""

from array import array

import torch
from torch import Tensor

from pagefleet_worker.paging.batch import Batch
from pagefleet_worker.paging.causal_model import CausalModel
from pagefleet_worker.paging.pools import make_pool
from pagefleet_worker.paging.slots import Row, Slot

HEADROOM = 2.0
LARGEST = 448.0
"""Of e4m3."""

TOKENS = 256


@torch.inference_mode()
def find_kv_scales(model: CausalModel, block_size: int, limit: int) -> Tensor:
    """Scales for a model that still keeps keys and values unrounded: float32 [layers, 2, G], on its
    device; `limit` is the most tokens that a step and a sequence may have.
    """
    config, count = model.config, min(TOKENS, limit)
    blocks = -(-count // block_size)
    pool = make_pool(config, blocks, block_size, model.kv_dtype, model.device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (count,), generator=generator)
    row = Row(0, Slot.bare(range(blocks)), 0, array("i", tokens.tolist()), 0)
    model.hidden(Batch.of([row], block_size, model.device), pool)
    return scales_for(pool.float().abs().amax((2, 4, 5)))


def scales_for(largest: Tensor) -> Tensor:
    """The scale for heads whose numbers get as large as `largest`; 1 for those that are all 0."""
    exponents = torch.ceil(torch.log2(largest * (HEADROOM / LARGEST)))
    return torch.where(largest > 0, torch.exp2(exponents), 1.0)
