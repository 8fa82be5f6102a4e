"""Log-probabilities and sampled tokens."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.correctness.comparison import Check, Inputs, error_of
from pagefleet_kernels.triton_logprobs import log_softmax
from pagefleet_kernels.triton_sampling import sample


def quick(inputs: Inputs) -> Iterator[partial[Check]]:
    """A few seconds in the interpreter."""
    yield partial(_logprobs, inputs, 3000)
    yield partial(_greedy, inputs, 1000)
    yield partial(_uniform, inputs, 16)
    yield partial(_cut, inputs, 600, 20, 0.9)


def full(inputs: Inputs) -> Iterator[partial[Check]]:
    """The vocabulary of a large model."""
    yield partial(_logprobs, inputs, 128256)
    yield partial(_greedy, inputs, 128256)
    yield partial(_uniform, inputs, 4000)
    for top_k, top_p in ((50, 1.0), (0, 0.9), (40, 0.95), (3000, 1.0)):
        yield partial(_cut, inputs, 128256, top_k, top_p)


def _logprobs(inputs: Inputs, vocabulary: int) -> Check:
    logits = inputs.normal(9, vocabulary) * 4
    error = error_of(log_softmax(logits), logits.double().log_softmax(-1))
    alone = torch.cat([log_softmax(row) for row in torch.split(logits, 1)])
    same = torch.equal(log_softmax(logits), alone)
    return Check("log_softmax", f"9 x {vocabulary}", error if same else torch.inf, 1e-5)


def _greedy(inputs: Inputs, vocabulary: int) -> Check:
    logits = inputs.normal(8, vocabulary).to(torch.bfloat16).float()
    found = _drawn(inputs, logits, temperature=0.0)
    lowest = (logits == logits.amax(-1, True)).int().argmax(-1)
    return Check("sample", f"greedy, {vocabulary} ids", float((found != lowest).sum()), 0.0)


def _drawn(
    inputs: Inputs, logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """A draw from each row."""
    count, device = len(logits), logits.device
    return sample(
        logits,
        torch.arange(count, device=device),
        torch.full((count,), temperature, device=device),
        torch.full((count,), top_k, dtype=torch.int32, device=device),
        torch.full((count,), top_p, dtype=torch.float64, device=device),
        torch.zeros(count, device=device),
        torch.arange(count, device=device) * 2**40,
        torch.zeros(count, dtype=torch.int32, device=device),
        torch.arange(count, dtype=torch.int32, device=device),
    )


def _uniform(inputs: Inputs, count: int) -> Check:
    """Of 4,096 equally likely tokens the id is the upper 12 bits of Philox: their mean, in units of
    its standard deviation, and whether the same draws come again.
    """
    found = _drawn(inputs, torch.zeros(count, 4096, device=inputs.device), temperature=1.0)
    again = _drawn(inputs, torch.zeros(count, 4096, device=inputs.device), temperature=1.0)
    deviation = (4096**2 / 12 / count) ** 0.5
    error = abs(float(found.double().mean()) - 2047.5) / deviation
    return Check("sample", "uniform, again", error if torch.equal(found, again) else torch.inf, 5.0)


def _cut(inputs: Inputs, vocabulary: int, top_k: int, top_p: float) -> Check:
    """How many draws lie outside what float64 leaves, give or take what float32 cannot tell."""
    logits = inputs.normal(16, vocabulary) * 2
    found = _drawn(inputs, logits, 0.8, top_k, top_p)
    masses = torch.softmax(logits.double() / 0.8, -1)
    values, order = masses.sort(-1, descending=True)
    if top_k:
        values[:, top_k:] = 0
    before = values.cumsum(-1) - values
    kept = (values > 0) & (before < top_p * values.sum(-1, True) + 1e-5)
    allowed = torch.zeros_like(kept).scatter_(-1, order, kept)
    chosen = allowed.gather(-1, found.clamp(0, vocabulary - 1).unsqueeze(-1)).squeeze(-1)
    outside = (found < 0) | (found >= vocabulary) | ~chosen
    case = f"top-k {top_k}, top-p {top_p}, {vocabulary} ids"
    return Check("sample", case, float(outside.sum()), 0.0)
