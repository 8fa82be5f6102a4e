"""Mixtures of experts that give a token the same bits in every batch.

On a CPU in float32 that takes matrix products whose rows are a multiple of `ROW_MULTIPLE` (see
`batch`), but an expert gets as many rows as there are tokens that chose it. So tokens of zeros are
appended, whose choices make every expert's rows a whole multiple.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pagefleet_worker.paging.batch import ROW_MULTIPLE

EXPERTS = "pagefleet"
"""The name of `_experts` in transformers."""


def _experts(module: Any, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """What transformers calls: hidden [T, size], choices and weights [T, k]; [T, size]."""
    count: int = module.num_experts
    lacking = -torch.bincount(choices.flatten(), minlength=count) % ROW_MULTIPLE
    added = torch.arange(count).repeat_interleave(lacking)
    k = choices.shape[1]
    while len(added) % k:  # whole multiples of the first one fill up the last token
        added = F.pad(added, (0, ROW_MULTIPLE))
    added = added.view(-1, k)
    choices = torch.cat([choices, added])
    padded, weights = (F.pad(values, (0, 0, 0, len(added))) for values in (hidden, weights))
    output: Tensor = type(module).forward.__wrapped__(module, padded, choices, weights)
    return output[: len(hidden)]


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
