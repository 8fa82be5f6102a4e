"""Mixtures of experts that give a token the same bits in every batch.

On a CPU in float32 that takes matrix products whose rows are a multiple of `ROW_MULTIPLE` (see
`batch`), but an expert gets as many rows as there are tokens that chose it. So tokens of zeros are
appended, each of which chooses one expert, until every expert that is chosen has a whole multiple.
Their other choices are expert number `num_experts`, which in transformers means none.
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
    nobody: int = module.num_experts
    counts = torch.bincount(choices.flatten(), minlength=nobody + 1)[:nobody]
    added = torch.arange(nobody).repeat_interleave(-counts % ROW_MULTIPLE)
    k = choices.shape[1]
    choices = torch.cat([choices, F.pad(added[:, None], (0, k - 1), value=nobody)])
    padded, weights = (F.pad(values, (0, 0, 0, len(added))) for values in (hidden, weights))
    output: Tensor = type(module).forward.__wrapped__(module, padded, choices, weights)
    return output[: len(hidden)]


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
