"""What a request is given does not depend on its company, bit for bit.

A stream is the same alone, among others, in whatever order they came, with and without drafts, and
after it was preempted; so are all choices of a request, and all beams, however few blocks there
are.
"""

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from pagefleet.params import SamplingParams
from pagefleet.wire import Logprobs
from pagefleet_scheduler.decoding import concatenate
from tests.cell import Cell
from tests.system.conftest import SMOLLM2, Case

TOGETHER = 32
SEEDED = SamplingParams(max_tokens=12, seed=0, temperature=1.0, top_p=0.95, logprobs=2)


class Asked(NamedTuple):
    """A request."""

    prompt: list[int]
    params: SamplingParams
    choices: int = 1


Given = list[tuple[list[int], Logprobs | None]]
"""Tokens and logprobs of each choice."""


def serve(cell: Cell, requests: Iterable[Asked]) -> list[Given]:
    """Serve all requests together."""
    clients = [cell.clients[cell.submit(*each)] for each in requests]
    cell.run()
    cell.assert_idle()
    return [
        [(client.tokens[n], concatenate(client.logprobs[n])) for n in client.tokens]
        for client in clients
    ]


@pytest.mark.parametrize("name", ["llama", "qwen3", pytest.param(SMOLLM2, marks=pytest.mark.slow)])
def test_seeded_requests(case: Callable[[str], Case], name: str) -> None:
    model, prompts = case(name).model, case(name).prompts(TOGETHER)
    requests = [Asked(prompt, replace(SEEDED, seed=random.randrange(2**64))) for prompt in prompts]
    print("requests", requests)
    given = serve(model.cell(), requests)
    for number in random.sample(range(TOGETHER), 4):
        assert serve(model.cell(), [requests[number]]) == [given[number]]
    order = random.sample(range(TOGETHER), TOGETHER)
    permuted = serve(model.cell(budget=64, drafts=3), [requests[number] for number in order])
    assert permuted == [given[number] for number in order]
    pressed = model.cell(blocks=14, budget=64, drafts=2)
    pressed.press()
    assert serve(pressed, requests) == given
    assert pressed.planner.preemptions > 0


KINDS = {
    "plain": (SamplingParams(max_tokens=10, seed=0), 1),
    "four choices": (SamplingParams(max_tokens=10, seed=0, temperature=1.0), 4),
    "four beams": (SamplingParams(max_tokens=10, seed=0, beam_width=4), 4),
    "penalties": (
        SamplingParams(
            max_tokens=10,
            seed=0,
            temperature=0.7,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.5,
        ),
        1,
    ),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("count", "tokens"),
    [pytest.param(3, 6, id="few"), pytest.param(20, 10, marks=pytest.mark.slow, id="twenty")],
)
def test_every_kind_of_request_in_forty_blocks(
    case: Callable[[str], Case], count: int, tokens: int
) -> None:
    smollm2 = case(SMOLLM2)

    def drawn(params: SamplingParams) -> SamplingParams:
        return replace(params, seed=random.randrange(2**64), max_tokens=tokens, logprobs=2)

    requests = [
        Asked(prompt, drawn(params), choices)
        for params, choices in KINDS.values()
        for prompt in smollm2.prompts(count)
    ]
    requests += [
        Asked(smollm2.corpus[:40] + prompt, drawn(SEEDED))
        for prompt in smollm2.prompts(count, longest=20)
    ]
    random.shuffle(requests)
    print("requests", requests)
    cell = smollm2.model.cell(blocks=40, budget=256, drafts=2)
    given = serve(cell, requests)
    assert cell.planner.preemptions > 0
    assert cell.planner.prefix_hits > 0
    for request, together in zip(requests, given, strict=True):
        assert serve(smollm2.model.cell(), [request]) == [together]
