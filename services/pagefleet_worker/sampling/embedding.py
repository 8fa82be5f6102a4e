"""Embeddings of prompts: what a model makes of a whole prompt, at its last token.

This is what models that are decoders are trained to be asked for ("last-token pooling": Wang et
al., "Improving Text Embeddings with Large Language Models", ACL 2024, section 3.2), and some of
them to be cut short (Kusupati et al., "Matryoshka Representation Learning", NeurIPS 2022).

The hidden states are taken on the device, with the step. On the host each is cut and scaled by
itself, in float64, so that no bit of it depends on its company.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from pagefleet.wire import Floats
from pagefleet_worker.paging.slots import Row
from pagefleet_worker.paging.transfer import to_device
from pagefleet_worker.sampling.samples import batch_ends


@dataclass(frozen=True, slots=True)
class Embedded:
    """Prompts that end in a step and whose embeddings are wanted."""

    rows: list[int]
    """Of the step."""
    dimensions: list[int]
    """Of each embedding; 0: all."""
    states: Tensor
    """[len(rows), hidden size] on the device: normed, of each prompt's last token."""

    @classmethod
    def of(cls, rows: Sequence[Row], hidden: Tensor) -> Self | None:
        """Those among `rows`, given the hidden states of all of their tokens; None if none is."""
        ends = {
            index: batch_end - 1
            for index, (row, batch_end) in enumerate(zip(rows, batch_ends(rows), strict=True))
            if row.embeds
        }
        if not ends:
            return None
        dimensions = [rows[index].slot.params.embedding or 0 for index in ends]
        return cls(list(ends), dimensions, hidden[to_device(list(ends.values()), hidden.device)])

    def to_wire(self, states: Tensor) -> dict[int, Floats | None]:
        """The embeddings by row, given `states` on the host; None: not all of it is finite."""
        found: dict[int, Floats | None] = {}
        for row, count, state in zip(self.rows, self.dimensions, states, strict=True):
            embedding = F.normalize(state[: count or None].double(), dim=0).float()
            finite = bool(embedding.isfinite().all())
            found[row] = embedding.numpy().astype(np.dtype("<f4")).tobytes() if finite else None
        return found
