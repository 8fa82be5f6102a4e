"""What a request's parameters do to its logits before a token is chosen, temperature excepted.

In this order: what a grammar allows, allowed tokens, bad words, tokens that may not come yet
(`min_tokens`), bias, repetition penalty (Keskar and others, "CTRL", 2019, section 4.1), frequency
and presence penalty (OpenAI's API reference). A forbidden token's logit is -inf, which no later
stage changes.

The histories live on the host: there each stage gathers what it changes over the whole batch, as
(row, tokens, amounts); on the device it is one indexed operation.
"""

from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from pagefleet_worker.paging.transfer import to_device
from pagefleet_worker.sampling.draw import Draw

_Edits: TypeAlias = list[tuple[int, ArrayLike, ArrayLike]]
"""(row, distinct tokens, one amount for each or for all); no row twice."""


def shape(scores: Tensor, draws: Sequence[Draw]) -> None:
    """Change the logits [len(draws), V] float32 in place, a row for each draw.

    Raises:
        IndexError: a parameter or a history names a token outside the vocabulary.
    """
    guide(scores, [draw.mask for draw in draws])
    _allow(scores, draws)
    _forbid(scores, draws)
    _bias(scores, draws)
    _penalize_repetition(scores, draws)
    _penalize_frequency(scores, draws)


def guide(scores: Tensor, masks: Sequence[bytes | None]) -> None:
    """Forbid what the grammars of rows [n, V] float32 do not allow (`Draw.mask`), in place.

    The masks travel as bits; on the device each byte becomes what is added to eight scores.
    """
    guided = {row: mask for row, mask in enumerate(masks) if mask is not None}
    if guided:
        device, packed = scores.device, np.frombuffer(b"".join(guided.values()), np.uint8)
        bits = to_device(packed.reshape(len(guided), -1), device)
        added = F.embedding(bits.int(), _added_by_byte(device)).flatten(1)
        rows = to_device(list(guided), device)
        scores.index_add_(0, rows, added[:, : scores.shape[-1]])


@cache
def _added_by_byte(device: torch.device) -> Tensor:
    """[256, 8] float32: 0 where a byte's bit is set, else -inf; the lowest bit first."""
    bits = torch.arange(256, device=device).unsqueeze(-1) >> torch.arange(8, device=device) & 1
    return torch.where(bits > 0, 0.0, -torch.inf)


def _allow(scores: Tensor, draws: Sequence[Draw]) -> None:
    for row, draw in enumerate(draws):
        if draw.params.allowed_token_ids is not None:
            allowed = to_device(draw.params.allowed_token_ids, scores.device, np.int64)
            kept = scores[row, allowed]
            scores[row] = -torch.inf
            scores[row, allowed] = kept


def _forbid(scores: Tensor, draws: Sequence[Draw]) -> None:
    edits: _Edits = [
        (row, list(forbidden), -np.inf)
        for row, draw in enumerate(draws)
        if (forbidden := draw.forbidden())
    ]
    if edits:
        rows, tokens, amounts = _gather(edits, scores.device)
        scores[rows, tokens] = amounts


def _bias(scores: Tensor, draws: Sequence[Draw]) -> None:
    edits: _Edits = [
        (row, list(bias), list(bias.values()))
        for row, draw in enumerate(draws)
        if (bias := draw.params.logit_bias)
    ]
    if edits:
        rows, tokens, amounts = _gather(edits, scores.device)
        scores[rows, tokens] += amounts


def _penalize_repetition(scores: Tensor, draws: Sequence[Draw]) -> None:
    edits: _Edits = [
        (row, np.bincount(draw.history).nonzero()[0], draw.params.repetition_penalty)
        for row, draw in enumerate(draws)
        if draw.params.repetition_penalty != 1
    ]
    if edits:
        rows, tokens, amounts = _gather(edits, scores.device)
        seen = scores[rows, tokens]
        scores[rows, tokens] = torch.where(seen < 0, seen * amounts, seen / amounts)


def _penalize_frequency(scores: Tensor, draws: Sequence[Draw]) -> None:
    edits: _Edits = []
    for row, draw in enumerate(draws):
        frequency, presence = draw.params.frequency_penalty, draw.params.presence_penalty
        outputs = draw.history[draw.prompt_length :]
        if (frequency or presence) and outputs:
            counts = np.bincount(outputs)
            present = counts.nonzero()[0]
            edits.append((row, present, frequency * counts[present] + presence))
    if edits:
        rows, tokens, amounts = _gather(edits, scores.device)
        scores[rows, tokens] -= amounts


def _gather(edits: _Edits, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, tokens (int64) and amounts (float32) of all edits, one after another."""
    tokens = [np.asarray(ids, dtype=np.int64) for _, ids, _ in edits]
    rows = np.repeat([row for row, _, _ in edits], [len(ids) for ids in tokens])
    amounts = [
        np.broadcast_to(np.asarray(values, dtype=np.float32), ids.shape)
        for ids, (_, _, values) in zip(tokens, edits, strict=True)
    ]
    return (
        to_device(rows, device),
        to_device(np.concatenate(tokens), device),
        to_device(np.concatenate(amounts), device),
    )
