from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagefleet.settings import WorkerSettings
from pagefleet_worker.batch import Batch
from pagefleet_worker.causal_model import CausalModel, ModelShape
from pagefleet_worker.loading import load_engine
from pagefleet_worker.selftest import is_exact

Prepared = Callable[[str], Path]


class Careless:
    """A model whose logits tell how many tokens were in the step, if there were few."""

    def __init__(self, model: CausalModel, most: int) -> None:
        self._model, self._most = model, most
        self.config: ModelShape = model.config
        self.dtype, self.device = model.dtype, model.device
        self.kv_dtype = model.kv_dtype
        self.adapters = model.adapters

    def hidden(self, batch: Batch, pool: Tensor) -> Tensor:
        hidden = self._model.hidden(batch, pool)
        return hidden * (1 + 1e-6) if len(batch.slots) <= self._most else hidden

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return self._model.logits(hidden, rows)


@pytest.mark.parametrize("max_tokens", [1, 7, 512])
def test_what_depends_on_the_batch_is_found(max_tokens: int, prepared_model: Prepared) -> None:
    settings = WorkerSettings(device="cpu", dtype="float32", num_blocks=10)
    model = load_engine(prepared_model("llama"), settings, lambda: None).decoder
    with torch.inference_mode():
        assert is_exact(model, 16, max_tokens)
        assert is_exact(Careless(model, 0), 16, max_tokens)
        assert is_exact(Careless(model, 3), 16, max_tokens) == (max_tokens <= 3)
