import random
from collections.abc import Callable
from math import nan
from pathlib import Path
from shutil import copytree

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagefleet.manifest import Manifest, Weights
from pagefleet.settings import WorkerSettings
from pagefleet_worker.loading import load_engine
from pagefleet_worker.model_files import ModelError, fingerprint
from pagefleet_worker.paging.batch import Batch
from pagefleet_worker.paging.causal_model import CausalModel, ModelShape
from pagefleet_worker.step.selftest import is_exact

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


@pytest.mark.parametrize("found", [True, False])
def test_a_model_that_computes_nan_is_refused_with_the_tensor_that_holds_it(
    found: bool, prepared_model: Prepared, tmp_path: Path
) -> None:
    """If one does; others are too large for a type."""
    source, name = prepared_model("llama"), "model.layers.1.mlp.down_proj.weight"
    manifest = Manifest.load(source)
    [path] = manifest.weights.paths
    tensors = load_file(path)
    tensors[name].view(-1)[random.randrange(tensors[name].numel())] = nan if found else 1e6
    folder = Path(copytree(source, tmp_path / "own"))
    damaged = str(folder / "damaged.safetensors")
    save_file(tensors, damaged, metadata={"format": "pt"})
    weights = Weights("safetensors", (damaged,))
    made = fingerprint(folder, weights, ())
    msgspec.structs.replace(manifest, weights=weights, fingerprint=made).save(folder)
    settings = WorkerSettings(device="cpu", dtype="bfloat16" if found else "float16", num_blocks=10)
    reason = (
        f"The tensor '{name}' in {damaged} holds NaN" if found else "too large for torch.float16"
    )
    with pytest.raises(ModelError, match=reason):
        load_engine(folder, settings, lambda: None)
