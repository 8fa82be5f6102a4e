"""Does a token get the same bits in every company? Asked at start, of this very machine.

Streams survive a worker because what was computed elsewhere, in other steps, is computed again to
the bit (DESIGN: exactness). The kernels are made for that; but a compiler, a library or a processor
might have other ideas, and only the model's own shapes on the worker's own threads would show it.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from pagefleet_worker.paging.batch import Batch
from pagefleet_worker.paging.causal_model import CausalModel
from pagefleet_worker.paging.pools import make_pool
from pagefleet_worker.paging.slots import Row, Slot

COMPANIES = (0, 1, 2, 3, 4, 7, 12, 20, 33, 70)
"""Other tokens in a step: around the borders of the tiles that matrix products are cut into."""

_LENGTH = 20
"""Tokens of the sequence whose last token is looked at."""


@torch.inference_mode()
def is_exact(model: CausalModel, block_size: int, limit: int) -> bool:
    """Whether the last token of a sequence has the same logits after one step over the whole of it
    and in steps of its own, beside other tokens; `limit` is the most that a step and a sequence
    may have. Where there are LoRA adapters it is asked of a sequence with and of one without.

    Raises:
        FloatingPointError: they are NaN.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(_LENGTH, limit)
    tokens = torch.randint(model.config.vocab_size, (length + max(COMPANIES),), generator=generator)
    sequence, others = array("i", tokens[:length].tolist()), array("i", tokens[length:].tolist())
    blocks = -(-len(tokens) // block_size) + 1
    pool = make_pool(model.config, blocks, block_size, model.kv_dtype, model.device)
    used = -(-length // block_size)
    for adapter in range(min(model.adapters, 1) + 1):
        slot = Slot.bare(range(used), adapter)
        other = Slot.bare(range(used, blocks), model.adapters - adapter)
        whole = _last_logits(model, [Row(0, slot, 0, sequence, 1)], block_size, pool)
        if whole.isnan().any():
            raise FloatingPointError("the model computes NaN")
        for company in COMPANIES:
            if company >= limit:
                break
            rows = [Row(1, other, 0, others[:company], 0)] if company else []
            rows.append(Row(0, slot, length - 1, sequence[-1:], 1))
            if not torch.equal(_last_logits(model, rows, block_size, pool), whole):
                return False
    return True


def _last_logits(model: CausalModel, rows: Sequence[Row], block_size: int, pool: Tensor) -> Tensor:
    """Those of the step's last token."""
    hidden = model.hidden(Batch.of(rows, block_size, model.device), pool)
    last = sum(len(row.tokens) for row in rows) - 1
    return model.logits(hidden, torch.tensor([last], device=model.device))
