"""The proof, at every start, that an adapted model computes what transformers itself computes.

Two random sequences go through the model as it is, with its own attention, one at a time; then
through the adapter, packed into the same two steps: the second step of each goes on from the pool.
A model that numbers positions by itself, lets neighbours in a batch mix, or hides something in a
mask that our attention never sees, gives other logits.
"""

from array import array
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagefleet.params import SamplingParams
from pagefleet_worker.adapter.model import AdaptedModel
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.paging.batch import Batch
from pagefleet_worker.paging.pools import make_pool
from pagefleet_worker.paging.slots import Row, Slot

_BLOCK_SIZE = 16
_BLOCKS = 6
_TABLES = ((3, 0, 5), (4, 1))
_ENDS = ((26, 42), (12, 28))
"""For each sequence, how far it has come after each step."""

_FINE, _COARSE = 1e-3, 0.2
"""How far logits may be from those of the model itself, as a share of their size, in float32 and in
the types of 16 bits. What is wrong in kind is further off.
"""


@dataclass(frozen=True)
class Expected:
    """Two sequences, and for each the logits of the model itself, float32 [length, vocabulary]."""

    sequences: tuple[list[int], ...]
    logits: tuple[Tensor, ...]

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel) -> Self:
        """Ask `model`, before it is adapted.

        Raises:
            ModelError: it cannot compute them.
        """
        generator = torch.Generator().manual_seed(0)
        sequences = tuple(
            torch.randint(model.config.vocab_size, (ends[-1],), generator=generator)
            for ends in _ENDS
        )
        logits = tuple(
            model(ids[None].to(model.device), use_cache=False).logits[0].float()
            for ids in sequences
        )
        return cls(tuple(ids.tolist() for ids in sequences), logits)


@torch.inference_mode()
def check(model: AdaptedModel, expected: Expected) -> None:
    """Compare `model` with what it should give.

    Raises:
        ModelError: it gives something else, or its attention cannot be served.
    """
    found = _packed_logits(model, expected.sequences)
    error = max(map(_distance, found, expected.logits))
    tolerance = _FINE if model.dtype == torch.float32 else _COARSE
    if not error <= tolerance:
        raise ModelError(
            f"packed sequences over paged attention give logits that are {error:.2g} of their size "
            "away from those of each sequence alone in transformers."
        )


def _packed_logits(model: AdaptedModel, sequences: tuple[list[int], ...]) -> list[Tensor]:
    pool = make_pool(model.config, _BLOCKS, _BLOCK_SIZE, model.dtype, model.device)
    slots = []
    for tokens, table in zip(sequences, _TABLES, strict=True):
        params = SamplingParams(max_tokens=0, seed=0)
        slots.append(Slot(params, len(tokens), array("i", tokens), [0], b""))
        slots[-1].table.extend(table)
    parts: list[list[Tensor]] = [[] for _ in slots]
    starts = [0] * len(slots)
    for ends in zip(*_ENDS, strict=True):
        rows = [
            Row(number, slot, start, slot.tokens[start:end], 0)
            for number, (slot, start, end) in enumerate(zip(slots, starts, ends, strict=True))
        ]
        hidden = model.hidden(Batch.of(rows, _BLOCK_SIZE, model.device), pool)
        counts = [len(row.tokens) for row in rows]
        logits = model.logits(hidden, torch.arange(sum(counts), device=model.device))
        for part, of_row in zip(parts, torch.split(logits, counts), strict=True):
            part.append(of_row)
        starts = list(ends)
    return [torch.cat(part) for part in parts]


def _distance(found: Tensor, expected: Tensor) -> float:
    """The largest error of a token's logits, as a share of how far they lie apart."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((found - expected).norm(dim=-1) / spread).max())
