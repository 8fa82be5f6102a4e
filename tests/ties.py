"""Near ties among experts: rounding decides which of them a token takes, and so what follows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CLEAR = 3e-5
"""Of the small models' scores, those in float32 are within 4e-6 of those in float64: two that are
so far apart stay in their order, however they are computed.
"""


class ExpertMargins(TorchFunctionMode):
    """Around what a model of transformers computes: how clearly its tokens take their experts, and
    groups of experts, which it finds by `topk`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._least = float("inf")

    @property
    def clear(self) -> bool:
        """Whether each was better than the best of those left by more than `CLEAR`."""
        return self._least > CLEAR

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk):
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(self, scores: Tensor, k: int, dim: int = -1, **_: Any) -> None:
        if k < scores.shape[dim]:
            last, following = scores.topk(k + 1, dim).values.narrow(dim, k - 1, 2).unbind(dim)
            self._least = min(self._least, (last - following).min().item())
