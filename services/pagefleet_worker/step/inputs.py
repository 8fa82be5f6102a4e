"""How a step's rows reach the model: from the host, or from what the device remembers.

On a CPU everything is known on the host: batches are laid out there, and a step is settled before
the next plan comes. On a GPU the next step is ordered while the last one runs, so whatever depends
on it is put together on the device (`device_slots`), and a decode step is one graph (`graphs`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagefleet_worker.paging.batch import Batch
from pagefleet_worker.paging.causal_model import CausalModel
from pagefleet_worker.paging.device_slots import DeviceSlots, pack_rows
from pagefleet_worker.paging.slots import Row, Step
from pagefleet_worker.paging.transfer import to_device
from pagefleet_worker.step.graphs import Capture, DecodeGraphs


class Inputs(Protocol):
    """Runs the model over the rows of steps, which come in their order."""

    settle_at_once: bool
    """Whether a step's samples must stand in its slots before the next step comes."""

    def update(self, step: Step) -> None:
        """Take what a plan changes in the slots."""
        ...

    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """The hidden states of all tokens of the rows, [at least T, hidden size]; the next step may
        overwrite them.
        """
        ...

    def keep(self, numbers: Sequence[int], tokens: Tensor) -> None:
        """Take the last samples, int64 [n] on the device, of the slots `numbers`."""
        ...


def by_adapter(rows: Sequence[Row]) -> tuple[Sequence[Row], NDArray[np.int64] | None]:
    """The rows in such an order that those of one LoRA adapter stand together, so that it is read
    once for all of them; and where in that order each token of `rows` stands, int64 [T], or None if
    it is the same.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index].adapter)
    if order == list(range(len(rows))):
        return rows, None
    together = [rows[index] for index in order]
    counts = [len(row.tokens) for row in together]
    owners = np.repeat(order, counts)
    return together, np.argsort(owners, kind="stable")


class HostInputs:
    """See `Inputs`; the slots of the host are all there is."""

    settle_at_once = True

    def __init__(self, decoder: CausalModel, pool: Tensor, block_size: int) -> None:
        self._decoder, self._pool, self._block_size = decoder, pool, block_size

    def update(self, step: Step) -> None:
        """Nothing to do."""

    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """See `Inputs`."""
        rows, places = by_adapter(rows)
        batch = Batch.of(rows, self._block_size, self._pool.device)
        hidden = self._decoder.hidden(batch, self._pool)
        return hidden if places is None else hidden[to_device(places, hidden.device)]

    def keep(self, numbers: Sequence[int], tokens: Tensor) -> None:
        """Nothing to do."""


class DeviceInputs:
    """See `Inputs`; `progress` is called for every step that is a graph."""

    settle_at_once = False

    def __init__(
        self,
        decoder: CausalModel,
        pool: Tensor,
        slots: DeviceSlots,
        progress: Callable[[], None],
    ) -> None:
        self._decoder, self._pool = decoder, pool
        self._slots = slots
        self._progress = progress
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], capture: Capture) -> None:
        """Have decode steps of up to `sizes[-1]` tokens replayed; see `DecodeGraphs`."""
        adapted = self._decoder.adapters > 0
        self._graphs = DecodeGraphs(self._forward, self._slots, sizes, capture, adapted=adapted)

    def update(self, step: Step) -> None:
        """See `Inputs`."""
        self._slots.update(step)

    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """See `Inputs`."""
        rows, places = by_adapter(rows)
        hidden = self._graphs.hidden(rows) if self._graphs is not None else None
        if hidden is not None:
            self._progress()
        else:
            adapted = any(row.adapter for row in rows)
            packed = to_device(pack_rows(rows, adapted=adapted), self._pool.device)
            width = max(-(-row.end // self._slots.block_size) for row in rows)
            batch = self._slots.batch(packed, len(rows), width, adapted=adapted)
            hidden = self._forward(batch)
        return hidden if places is None else hidden[to_device(places, hidden.device)]

    def keep(self, numbers: Sequence[int], tokens: Tensor) -> None:
        """See `Inputs`."""
        self._slots.keep(numbers, tokens)

    def _forward(self, batch: Batch) -> Tensor:
        return self._decoder.hidden(batch, self._pool)
