"""Logprobs as the model gave them: before masks, penalties and temperature.

A mask does not change a logprob, but a beam is shown only alternatives that its grammar allows; in
the place of those that it lacks is -inf.

They are ordered on the device with the step, and read when its result is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pagefleet.wire import Logprobs, pack_floats, pack_ints
from pagefleet_kernels import reference
from pagefleet_worker.paging.transfer import to_device
from pagefleet_worker.sampling.draw import Draw
from pagefleet_worker.sampling.selection import chunk_rows, top
from pagefleet_worker.sampling.shaping import guide


@dataclass(frozen=True, slots=True)
class Ranked:
    """Logprobs of m tokens, and of the k most likely ones in their places, on the device."""

    chosen: Tensor
    """[m] float32"""
    top_ids: Tensor
    """[m, k] int64, most likely first, the lower id first of equal ones."""
    top: Tensor
    """[m, k] float32"""

    def to_wire(self) -> Logprobs:
        """Read them, as one run of tokens."""
        return Logprobs(
            pack_floats(self.chosen.tolist()),
            pack_ints(self.top_ids.flatten().tolist()),
            pack_floats(self.top.flatten().tolist()),
        )

    def to_wire_each(self) -> list[Logprobs]:
        """Read them, each token for itself."""
        chosen, ids, values = self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist()
        return [
            Logprobs(pack_floats([chosen[row]]), pack_ints(ids[row]), pack_floats(values[row]))
            for row in range(len(chosen))
        ]


LogSoftmax: TypeAlias = Callable[[Tensor], Tensor]
"""That of the device's kernels."""


def rank(
    logits: Tensor,
    tokens: Tensor,
    count: int,
    log_softmax: LogSoftmax = reference.log_softmax,
    masks: Sequence[bytes | None] = (),
) -> Ranked:
    """log_softmax of logits [m, V] float32 at `tokens` [m] int64 and at the `count` best.

    For a prompt: the logits of its positions but the last, and its tokens from the second on.
    masks: of each row, the tokens that are ranked (`Draw.mask`); none: all.
    """
    size = chunk_rows(logits)
    chunks = zip(torch.split(logits, size), torch.split(tokens, size), strict=True)
    parts = [
        _rank(log_softmax(rows), chosen, count, masks[number * size : (number + 1) * size])
        for number, (rows, chosen) in enumerate(chunks)
    ]
    return Ranked(
        torch.cat([part.chosen for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top for part in parts]),
    )


def _rank(logprobs: Tensor, tokens: Tensor, count: int, masks: Sequence[bytes | None]) -> Ranked:
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    guide(logprobs, masks)
    best = top(logprobs, count)
    return Ranked(chosen, best, logprobs.gather(-1, best))


@dataclass(frozen=True, slots=True)
class DrawLogprobs:
    """The logprobs that the draws of a step ask for, on the device."""

    groups: list[tuple[list[int], Ranked]]
    """Indices of draws that ask for equally many alternatives."""

    @classmethod
    def of(
        cls,
        logits: Tensor,
        draws: Sequence[Draw],
        tokens: Tensor,
        log_softmax: LogSoftmax = reference.log_softmax,
    ) -> "DrawLogprobs":
        """Of the tokens that `sample` chose from the same logits for the same draws.

        A draw without a token gets the logprob of token 0.
        """
        asking: dict[int, list[int]] = {}
        for index, draw in enumerate(draws):
            if draw.params.logprobs is not None:
                asking.setdefault(draw.params.logprobs, []).append(index)
        return cls(
            [
                (
                    indices,
                    rank(
                        logits[
                            to_device([draws[index].logits for index in indices], logits.device)
                        ],
                        tokens[to_device(indices, tokens.device)].clamp(min=0),
                        count,
                        log_softmax,
                        [draws[index].confines for index in indices],
                    ),
                )
                for count, indices in asking.items()
            ]
        )

    def to_wire(self) -> list[tuple[int, Logprobs]]:
        """Read them: (index of the draw, its logprobs), by index."""
        read = (zip(indices, ranked.to_wire_each(), strict=True) for indices, ranked in self.groups)
        return sorted((pair for group in read for pair in group), key=lambda pair: pair[0])
