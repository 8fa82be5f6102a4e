"""Cells of TorchEngines: a model is loaded once, each cell has a pool of its own."""

from dataclasses import replace
from pathlib import Path

import torch

from pagefleet.manifest import Manifest
from pagefleet.settings import WorkerSettings
from pagefleet_worker.loading import load_engine
from pagefleet_worker.paging.pools import make_pool
from pagefleet_worker.step.engine import TorchEngine
from tests.cell import Cell

BLOCK_SIZE = 16


class LoadedModel:
    """A prepared model in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        settings = WorkerSettings(device="cpu", num_blocks=1, block_size=BLOCK_SIZE)
        self.manifest = Manifest.load(folder)
        self._engine = load_engine(folder, replace(settings, dtype="float32"), lambda: None)

    def cell(
        self, *, blocks: int = 400, budget: int = 4096, slots: int = 64, **options: int
    ) -> Cell:
        """A cell with one worker; its pool holds NaN wherever nothing was written."""
        cell = Cell(lambda: self._with_pool(blocks, budget, slots), **options)
        cell.join()
        return cell

    def _with_pool(self, blocks: int, budget: int, slots: int) -> TorchEngine:
        loaded = self._engine
        facts = replace(
            loaded.facts,
            blocks=blocks,
            slots=slots,
            max_batched_tokens=budget,
            max_model_len=min(self.manifest.max_model_len, blocks * BLOCK_SIZE),
        )
        pool = make_pool(
            loaded.decoder.config, blocks, BLOCK_SIZE, torch.float32, torch.device("cpu")
        )
        pool.fill_(torch.nan)
        return TorchEngine(facts, loaded.decoder, loaded.kernels, pool)
