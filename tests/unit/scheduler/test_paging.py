"""Paging as a whole: whatever is shared, preempted, chunked, forked, aborted or killed in whatever
order, each stream is what it would have been alone (EchoEngine), and every block comes back.
"""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagefleet.params import SamplingParams
from tests.echo_cell import EchoCell

EMBEDDING = SamplingParams(max_tokens=0, seed=0, embedding=0)


def some_params(draw: random.Random, **fixed: object) -> SamplingParams:
    """Parameters that make use of everything that depends on history."""
    fixed.setdefault("max_tokens", draw.randint(1, 24))
    fields = {
        "seed": draw.randrange(2**64),
        "temperature": draw.choice([0.0, 1.0]),
        "top_k": draw.choice([0, 5]),
        "repetition_penalty": draw.choice([1.0, 1.3]),
        "presence_penalty": draw.choice([0.0, 0.5]),
        "min_tokens": min(fixed["max_tokens"], draw.choice([0, 1])),
        "eos_token_ids": draw.choice([(), (3,)]),
        "logprobs": draw.choice([None, 2]),
        "allowed_token_ids": draw.choice([None, None, (5,), (5, 9, 3)]),
        "adapter": draw.choice([0, 0, 1, 2]),
    }
    return SamplingParams(**(fields | fixed))  # type: ignore[arg-type]


def some_prompt(draw: random.Random, longest: int = 40) -> list[int]:
    """Prompts that often begin alike, up to somewhere within a block."""
    common = [7] * draw.randint(0, longest // 2)
    return common + [draw.randrange(200) for _ in range(draw.randint(1, longest // 2))]


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize(
    ("caching", "host_blocks"), [(False, 0), (True, 0), (True, 30), (True, 400)]
)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("blocks", "budget"), [(200, 64), (24, 16), (24, 5), (17, 100)])
def test_many_requests_at_once(
    blocks: int, budget: int, drafts: int, caching: bool, host_blocks: int, lookahead: bool
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    cell = EchoCell(
        blocks=blocks,
        budget=budget,
        drafts=drafts,
        caching=caching,
        host_blocks=host_blocks,
        lookahead=lookahead,
    )
    cell.join()
    if blocks < 200:
        cell.press()
    for number in range(16):
        salt, params = draw.choice([b"", b"tenant"]), some_params(draw)
        if number % 4 == 0:
            cell.submit(some_prompt(draw), EMBEDDING, salt=salt)
        salt += bytes(params.adapter)
        cell.submit(some_prompt(draw), params, choices=draw.choice([1, 1, 4]), salt=salt)
    cell.run()
    cell.compare()
    cell.assert_idle()
    (planner,) = cell.scheduler.placement.planners
    assert (planner.preemptions > 0) == (blocks < 200)
    assert planner.speculation.drafted == 0 or drafts > 0
    if not caching:
        assert planner.cache.pool.cached == 0
    if blocks < 200:
        assert (planner.cache.host.moved_out > 0) == (host_blocks > 0)
        assert planner.cache.host.moved_in > 0 or host_blocks < 400  # 30 may hold nothing in time
        assert planner.cache.host.moved_in == 0 or host_blocks > 0


def test_a_sequence_that_repeats_itself_takes_fewer_steps() -> None:
    params = SamplingParams(max_tokens=60, seed=1, allowed_token_ids=(5,))
    steps = {}
    for drafts in (0, 4):
        cell = EchoCell(drafts=drafts, block_size=16)
        cell.join()
        cell.submit([1, 2, 3], params)
        cell.run()
        cell.compare()
        cell.assert_idle()
        steps[drafts] = cell.steps
    assert steps[4] < steps[0] / 3


def test_moving_is_left_alone_where_computing_is_faster() -> None:
    cell = EchoCell(blocks=17, host_blocks=100, swap_micros=9.0, compute_micros=1.0)
    cell.join()
    for _ in range(8):
        cell.submit(some_prompt(random.Random(1)), SamplingParams(max_tokens=24, seed=1))
    cell.run()
    cell.compare()
    (planner,) = cell.scheduler.placement.planners
    assert planner.preemptions > 0
    assert planner.cache.host.moved_out == 0


def test_the_oldest_always_goes_on() -> None:
    """Whatever comes later, the oldest request ends after as many steps as it needs alone."""
    draw = random.Random(random.randrange(2**32))
    cell = EchoCell(blocks=14, budget=8, lookahead=False)
    worker = cell.join()
    oldest = cell.submit([1] * 20, SamplingParams(max_tokens=20, seed=1))
    for _ in range(20 // 7 + 21):
        cell.submit(some_prompt(draw), SamplingParams(max_tokens=draw.randint(1, 12), seed=1))
        cell.step(worker)
        if not cell.clients[oldest].open:
            break
    assert not cell.clients[oldest].open


def test_the_next_turn_of_a_chat_hits_its_own_answer() -> None:
    cell = EchoCell()
    cell.join()
    first = cell.submit([5] * 8, SamplingParams(max_tokens=9, seed=1))
    cell.run()
    turn = [5] * 8 + cell.clients[first].tokens[0] + [9, 9]
    cell.submit(turn, SamplingParams(max_tokens=3, seed=1))
    cell.run()
    cell.compare()
    (planner,) = cell.scheduler.placement.planners
    assert planner.prefix_hits == 16


@pytest.mark.parametrize("length", range(1, 14))
def test_hit_and_miss_are_equal_around_block_borders(length: int) -> None:
    cell = EchoCell()
    cell.join()
    params = SamplingParams(max_tokens=6, seed=1)
    for _ in range(2):
        cell.submit(list(range(length)), params)
        cell.run()
    cell.compare()
    (planner,) = cell.scheduler.placement.planners
    assert planner.prefix_hits == (length - 1) // 4 * 4
    assert cell.clients["r0"].tokens == cell.clients["r1"].tokens


class Life(RuleBasedStateMachine):
    """Requests come and go, workers come and die, steps are computed in any order."""

    @initialize(
        seed=st.integers(0, 2**32),
        blocks=st.integers(14, 40),
        slots=st.integers(2, 6),
        budget=st.integers(1, 40),
        lookahead=st.booleans(),
        caching=st.booleans(),
        host_blocks=st.sampled_from([0, 3, 40]),
        drafts=st.sampled_from([0, 1, 4]),
    )
    def begin(self, seed: int, **sizes: int) -> None:
        self.draw = random.Random(seed)
        self.cell = EchoCell(**sizes)
        self.cell.join()

    @rule(choices=st.sampled_from([1, 1, 1, 2, 4]))
    def submit(self, choices: int) -> None:
        params = some_params(self.draw, max_tokens=self.draw.randint(0, 15))
        self.cell.submit(some_prompt(self.draw, 30), params, choices, bytes(params.adapter))

    @rule(choices=st.sampled_from([1, 1, 3]))
    def embed(self, choices: int) -> None:
        self.cell.submit(some_prompt(self.draw, 30), EMBEDDING, choices)

    @rule()
    def search(self) -> None:
        adapter = self.draw.choice([0, 1])
        params = SamplingParams(
            max_tokens=self.draw.randint(0, 8),
            seed=0,
            eos_token_ids=(3,),
            beam_width=2,
            adapter=adapter,
        )
        self.cell.submit(some_prompt(self.draw, 12), params, 2, bytes(adapter))

    @rule(steps=st.integers(1, 8))
    def compute(self, steps: int) -> None:
        for _ in range(steps):
            if self.cell.workers:
                self.cell.step(self.draw.choice(list(self.cell.workers)))

    @precondition(lambda self: any(client.open for client in self.cell.clients.values()))
    @rule(whole=st.booleans())
    def abort(self, whole: bool) -> None:
        open_ones = [name for name, client in self.cell.clients.items() if client.open]
        request = self.draw.choice(open_ones)
        left = self.cell.clients[request]
        choices = sorted(left.tokens.keys() - left.finished.keys() - left.aborted)
        self.cell.abort(request, None if whole else [self.draw.choice(choices)])

    @precondition(lambda self: len(self.cell.workers) < 3)
    @rule()
    def join(self) -> None:
        self.cell.join()

    @precondition(lambda self: self.cell.workers)
    @rule()
    def kill(self) -> None:
        self.cell.kill(self.draw.choice(list(self.cell.workers)))

    def teardown(self) -> None:
        if not hasattr(self, "cell"):
            return
        if not self.cell.workers:
            self.cell.join()
        self.cell.run()
        self.cell.compare()
        self.cell.assert_idle()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
