"""The planner, step by step: what a plan orders, for situations made by hand."""

from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pagefleet.params import Guide, SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    SAMPLED,
    Logprobs,
    Plan,
    PromptLogprobs,
    Result,
    WorkerHello,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler import decoding, plan_writer
from pagefleet_scheduler.beam import BeamSearch
from pagefleet_scheduler.flights import ResultError
from pagefleet_scheduler.pace import LEAST_OF_PROMPTS, PROMPT_SECONDS
from pagefleet_scheduler.planner import Planner
from pagefleet_scheduler.sequence import Request, Sequence

SIZE = 4


def planner(
    blocks: int = 20,
    slots: int = 8,
    budget: int = 64,
    exact: bool = True,
    requeue: Callable[[Sequence], None] = lambda sequence: None,
    **options: int | None,
) -> Planner:
    hello = WorkerHello(
        PROTOCOL, "h", 1, 1, "model", "class", SIZE, blocks, slots, 80, budget, 99, exact=exact
    )
    return Planner(hello, 1, requeue=requeue, check=True, **options)


class Arrivals:
    """Makes sequences that arrive one after another."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self,
        prompt: int | list[int],
        max_tokens: int = 8,
        choices: int = 1,
        **fields: Any,
    ) -> Sequence:
        self.count += 1
        tokens = (
            prompt if isinstance(prompt, list) else [self.count * 10 + n for n in range(prompt)]
        )
        params = SamplingParams(max_tokens=max_tokens, seed=1, **fields)
        order = (0, float(self.count), self.count)
        request = Request(
            f"r{self.count}", 0, b"g", array("i", tokens), params, b"", order, float(self.count)
        )
        sequence = Sequence(request, list(range(choices)), array("i", tokens))
        request.sequences = dict.fromkeys(range(choices), sequence)
        return sequence


@pytest.fixture
def arrive() -> Arrivals:
    return Arrivals()


def rows(plan: Plan | None) -> list[tuple[int, int, int, int]]:
    """(slot, start, count, logits) of each row."""
    assert plan is not None
    columns = unpack_ints(plan.rows)
    return [tuple(columns[at : at + 4]) for at in range(0, len(columns), 6)]  # type: ignore[misc]


def plan_of(planner: Planner) -> Plan | None:
    plan = planner.plan()
    planner.check()
    return plan


def answer(planner: Planner, *tokens: int) -> None:
    """The oldest step sampled `tokens`; they are taken in."""
    flight = planner.flights[0]
    accepted = planner.accept(Result(1, flight.plan.step, pack_ints(tokens)))
    for sampled in accepted.sampled:
        decoding.extend(sampled.sequence, sampled.tokens, sampled.logprobs)
    planner.check()


def test_a_long_prompt_goes_in_chunks_and_samples_at_its_end(arrive: Arrivals) -> None:
    worker = planner(budget=8, lookahead=False)
    worker.admit(arrive(18))
    assert rows(plan_of(worker)) == [(0, 0, 8, 0)]
    answer(worker)
    assert rows(plan_of(worker)) == [(0, 8, 8, 0)]
    answer(worker)
    assert rows(plan_of(worker)) == [(0, 16, 2, 1)]


def test_a_decode_keeps_its_token_beside_a_prefill(arrive: Arrivals) -> None:
    worker = planner(budget=8, lookahead=False)
    worker.admit(arrive(2))
    assert rows(plan_of(worker)) == [(0, 0, 2, 1)]
    answer(worker, 50)
    worker.admit(arrive(30))
    worker.admit(arrive(1))
    assert rows(plan_of(worker)) == [(0, 2, 1, 1), (1, 0, 6, 0), (2, 0, 1, 1)]


@pytest.mark.parametrize(("fitting", "chunk"), [(100, 100), (1, LEAST_OF_PROMPTS), (9999, 250)])
def test_slow_prompts_go_in_shorter_chunks(arrive: Arrivals, fitting: int, chunk: int) -> None:
    """As many tokens as fit into a time; who decodes beside them gets a token in any case."""
    worker = planner(blocks=200, budget=300, lookahead=False)
    worker.admit(arrive(2))
    plan_of(worker)
    worker.pace.landed(worker.flights[0], 2 * PROMPT_SECONDS / fitting)
    answer(worker, 50)
    for prompt in (250, 250, 1):
        worker.admit(arrive(prompt))
    rest = [(2, 0, 48, 0)] if chunk == 250 else []
    assert rows(plan_of(worker)) == [
        (0, 2, 1, 1),
        (1, 0, chunk, int(chunk == 250)),
        *rest,
        (3, 0, 1, 1),
    ]


def test_the_first_prompt_of_a_worker_tells_how_fast_it_is(arrive: Arrivals) -> None:
    worker = planner(blocks=200, budget=400)
    worker.admit(arrive(380))
    first, second = plan_of(worker), plan_of(worker)
    assert rows(first) + rows(second) == [(0, at, LEAST_OF_PROMPTS, 0) for at in (0, 64)]
    worker.pace.landed(worker.flights[0], 0.01)
    answer(worker)
    assert rows(plan_of(worker)) == [(0, 128, 252, 1)]


@pytest.mark.parametrize(
    ("prompt", "decoding", "chunk"),
    [
        (300, False, 300),
        (300, True, 150),
        (900, True, 300),
        (5000, True, 1000),
        (5000, False, 1000),
    ],
)
def test_prompts_go_in_shorter_chunks_beside_those_that_decode(
    arrive: Arrivals, prompt: int, decoding: bool, chunk: int
) -> None:
    """A thousand tokens take a second here: a chunk takes 0.15, or a third of what waits."""
    worker = planner(blocks=2000, budget=2000, lookahead=False)
    first = arrive(2)
    worker.admit(first)
    plan_of(worker)
    worker.pace.landed(worker.flights[0], 0.002)
    answer(worker, 50)
    if not decoding:
        worker.remove(first)
    worker.admit(arrive(prompt))
    *beside, row = rows(plan_of(worker))
    assert row[1:3] == (0, chunk)
    assert len(beside) == decoding


def test_lookahead_feeds_what_is_still_to_be_sampled(arrive: Arrivals) -> None:
    worker = planner()
    worker.admit(arrive(2))
    first, second = plan_of(worker), plan_of(worker)
    assert rows(first) == [(0, 0, 2, 1)]
    assert rows(second) == [(0, 2, 1, 1)]
    assert second is not None
    assert list(unpack_ints(second.tokens)) == [SAMPLED]
    assert plan_of(worker) is None
    answer(worker, 50)
    third = plan_of(worker)
    assert rows(third) == [(0, 3, 1, 1)]


def test_who_repeats_itself_waits_for_its_token(arrive: Arrivals) -> None:
    worker = planner(drafts=2)
    worker.admit(sequence := arrive([7, 7, 7, 7]))
    assert rows(plan_of(worker)) == [(0, 0, 4, 1)]
    assert plan_of(worker) is None
    answer(worker, 7)
    assert rows(plan_of(worker)) == [(0, 4, 3, 3)]
    answer(worker, 7, 5, 9)
    assert list(sequence.tokens) == [7, 7, 7, 7, 7, 7, 5]
    assert (worker.speculation.drafted, worker.speculation.kept) == (2, 1)


@pytest.mark.parametrize("exact", [True, False])
def test_drafts_are_usual_only_where_they_change_no_bit(arrive: Arrivals, exact: bool) -> None:
    worker = planner(drafts=None, exact=exact)
    worker.admit(arrive([7, 7, 7, 7]))
    plan_of(worker)
    lookahead = plan_of(worker)
    assert (lookahead is None) == exact
    answer(worker, 7)
    assert rows(lookahead or plan_of(worker)) == [(0, 4, 4, 4) if exact else (0, 4, 1, 1)]


def test_no_more_is_drafted_than_a_worker_has_room_for_logits(arrive: Arrivals) -> None:
    worker = planner(drafts=3, slots=5)
    for _ in range(2):
        worker.admit(arrive([7, 7, 7, 7]))
    plan_of(worker)
    answer(worker, 7, 7)
    assert rows(plan_of(worker)) == [(0, 4, 4, 4), (1, 4, 1, 1)]


def test_whoever_comes_ends_the_wait_for_drafts(arrive: Arrivals) -> None:
    worker = planner(drafts=2)
    worker.admit(arrive([7, 7, 7, 7]))
    plan_of(worker)
    assert plan_of(worker) is None
    worker.admit(arrive(6))
    assert rows(plan_of(worker)) == [(0, 4, 1, 1), (1, 0, 6, 1)]


def test_nobody_drafts_beside_a_prompt(arrive: Arrivals) -> None:
    worker = planner(drafts=2, budget=8)
    worker.admit(arrive([7, 7, 7, 7]))
    plan_of(worker)
    answer(worker, 7)
    worker.admit(arrive(20))
    assert rows(plan_of(worker)) == [(0, 4, 1, 1), (1, 0, 7, 0)]
    assert rows(plan_of(worker)) == [(0, 5, 1, 1), (1, 7, 7, 0)]
    answer(worker, 7)
    answer(worker, 7)
    assert rows(plan_of(worker)) == [(0, 6, 1, 1), (1, 14, 6, 1)]
    assert plan_of(worker) is None, "the first one's next token may have drafts behind it"


def test_choices_that_begin_together_have_no_drafts(arrive: Arrivals) -> None:
    """All but the last token of the prompt are cached, so that this one could have drafts."""
    worker = planner(drafts=2)
    first = arrive([7] * 5)
    worker.admit(first)
    plan_of(worker)
    answer(worker, 7)
    worker.remove(first)
    worker.admit(arrive([7] * 5, choices=2))
    assert rows(plan_of(worker)) == [(0, 4, 1, 1)]


def test_no_more_is_drafted_than_may_come(arrive: Arrivals) -> None:
    worker = planner(drafts=4)
    worker.admit(arrive([7, 7, 7, 7], max_tokens=3))
    plan_of(worker)
    answer(worker, 7)
    assert rows(plan_of(worker)) == [(0, 4, 2, 2)]


def test_nothing_is_fed_after_the_last_token(arrive: Arrivals) -> None:
    worker = planner()
    worker.admit(arrive(2, max_tokens=2))
    plan_of(worker)
    plan_of(worker)
    answer(worker, 50)
    assert plan_of(worker) is None


def test_only_what_changed_in_a_table_is_told(arrive: Arrivals) -> None:
    worker = planner(lookahead=False)
    sequence = arrive(3)
    worker.admit(sequence)
    first = plan_of(worker)
    assert first is not None
    assert list(unpack_ints(first.tables)) == [0, 0, sequence.table[0]]
    answer(worker, 50)
    second = plan_of(worker)
    assert second is not None
    assert (second.tables, second.opens) == (b"", [])
    answer(worker, 51)
    third = plan_of(worker)
    assert third is not None
    assert list(unpack_ints(third.tables)) == [0, 1, sequence.table[1]]


def test_the_latest_gives_its_blocks_to_the_oldest(arrive: Arrivals) -> None:
    preempted: list[Sequence] = []
    worker = planner(blocks=4, lookahead=False, requeue=preempted.append)
    old, new = arrive(7), arrive(3)
    worker.admit(old)
    worker.admit(new)
    new.proven = True
    while not preempted:
        assert worker.plan() is not None
        samples = sum(row.samples for row in worker.flights[0].rows)
        answer(worker, *range(50, 50 + samples))
    assert preempted == [new]
    assert worker.preemptions == 1
    assert (new.slot, new.ordered, list(new.table), new.proven) == (None, 0, [], False)
    worker.check()


def tokens_for_all(worker: Planner) -> Plan | None:
    """A step that gives each of its rows a token."""
    plan = worker.plan()
    if plan is not None:
        answer(worker, *[50] * sum(row.samples for row in worker.flights[0].rows))
    return plan


def test_no_more_is_preempted_than_is_needed(arrive: Arrivals) -> None:
    preempted: list[Sequence] = []
    worker = planner(blocks=6, lookahead=False, requeue=preempted.append)
    sequences = [arrive(7), arrive(6), arrive(6)]
    for sequence in sequences:
        worker.admit(sequence)
    while not preempted:
        tokens_for_all(worker)
    assert preempted == sequences[2:]
    assert worker.running == sequences[:2]


def let_in_again(worker: Planner, sequence: Sequence) -> None:
    """It runs for the second time."""
    worker.admit(sequence)
    worker.preempt(sequence)
    worker.cache.pool.settle()
    worker.admit(sequence)


def test_who_came_back_keeps_its_blocks_until_it_has_a_token(arrive: Arrivals) -> None:
    preempted: list[Sequence] = []
    worker = planner(blocks=6, budget=9, lookahead=False, requeue=preempted.append)
    worker.admit(arrive(5))
    worker.admit(arrive(4))
    let_in_again(worker, back := arrive(9))
    preempted.clear()
    assert rows(tokens_for_all(worker)) == [(0, 0, 5, 1), (1, 0, 4, 1)]
    assert rows(tokens_for_all(worker)) == [(0, 5, 1, 1), (2, 0, 8, 0)]
    assert rows(tokens_for_all(worker)) == [(0, 6, 1, 1), (2, 8, 1, 1)]
    assert preempted == []
    tokens_for_all(worker)
    assert preempted == [back]


def test_a_token_that_came_after_its_blocks_were_lost_proves_nothing(arrive: Arrivals) -> None:
    worker = planner()
    runs, waits = arrive(3), arrive(3)
    worker.admit(runs)
    worker.admit(waits)
    plan_of(worker)
    worker.preempt(waits)
    answer(worker, 50, 50)
    assert (runs.proven, waits.proven) == (True, False)


def test_the_oldest_takes_blocks_from_anybody(arrive: Arrivals) -> None:
    preempted: list[Sequence] = []
    worker = planner(blocks=4, budget=4, lookahead=False, requeue=preempted.append)
    worker.admit(arrive(4))
    let_in_again(worker, back := arrive(9))
    preempted.clear()
    tokens_for_all(worker)
    assert rows(tokens_for_all(worker)) == [(0, 4, 1, 1)]
    assert preempted == [back]


def test_the_beams_of_one_search_lose_their_blocks_together(arrive: Arrivals) -> None:
    preempted: list[Sequence] = []
    worker = planner(requeue=preempted.append)
    beam, other = arrive(6), arrive(6)
    beam.request.search = BeamSearch(beam.request.params)
    worker.admit(beam)
    sibling = beam.forked(1)
    worker.fork([beam, sibling])
    worker.admit(other)
    sibling.candidates = Logprobs(b"", b"", b"")
    worker.preempt(beam)
    assert preempted == [beam, sibling]
    assert worker.running == [other]
    worker.check()
    worker.cache.pool.settle()
    worker.admit(sibling)
    assert sibling.candidates is None


def test_a_beam_idles_while_the_others_are_computed_and_not_before(arrive: Arrivals) -> None:
    worker = planner()
    beam = arrive(6)
    beam.request.search = BeamSearch(beam.request.params)
    worker.admit(beam)
    assert not beam.idles
    plan_of(worker)
    assert not beam.idles
    worker.accept(Result(1, 0, pack_ints([50])))
    assert beam.idles


def test_a_prompt_that_was_all_is_not_computed_again(arrive: Arrivals) -> None:
    worker = planner()
    sequence = arrive(6, max_tokens=0)
    worker.admit(sequence)
    plan_of(worker)
    worker.preempt(sequence)
    result = Result(1, 0, b"", embeddings=[(0, b"1234")])
    assert worker.accept(result).completed == {sequence: b"1234"}


def test_what_is_found_of_outputs_counts_as_no_part_of_a_prompt(arrive: Arrivals) -> None:
    worker = planner()
    first, second = arrive([*range(12)]), arrive([*range(6)])
    worker.admit(first)
    plan_of(worker)
    answer(worker, 50)
    second.tokens.extend([*range(6, 12)])
    worker.admit(second)
    assert (second.computed, second.cached) == (8, 6)


def test_choices_share_blocks_and_copy_on_write(arrive: Arrivals) -> None:
    worker = planner(lookahead=False)
    parent = arrive(6, choices=3)
    worker.admit(parent)
    first = plan_of(worker)
    assert first is not None
    assert rows(first) == [(0, 0, 6, 1)]
    accepted = worker.accept(Result(1, 0, pack_ints([50, 51, 52])))
    (sampled,) = accepted.sampled
    sequences = decoding.fork(sampled.sequence)
    worker.fork(sequences)
    assert worker.running == sequences
    for sequence, token in zip(sequences, sampled.tokens, strict=True):
        decoding.extend(sequence, array("i", [token]), [None])
    worker.check()
    partial = parent.table[1]
    assert worker.cache.pool.held == 2
    plan = plan_of(worker)
    assert plan is not None
    assert list(unpack_ints(plan.forks)) == [1, 0, 1, 2, 0, 2, 0, 0, 0]
    assert list(unpack_ints(plan.tokens)) == [50, 51, 52]
    copies = unpack_ints(plan.copies)
    assert list(copies[::2]) == [partial, partial]
    assert {sequence.table[1] for sequence in sequences} == {partial, *copies[1::2]}
    assert len({sequence.table[0] for sequence in sequences}) == 1
    assert worker.cache.pool.held == 4


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_slot_in_a_fork_that_is_not_ordered_yet_ends_in_order(
    arrive: Arrivals, gone: int
) -> None:
    worker = planner(slots=3, lookahead=False)
    parent = arrive(6, choices=3)
    worker.admit(parent)
    plan_of(worker)
    (sampled,) = worker.accept(Result(1, 0, pack_ints([50, 51, 52]))).sampled
    sequences = decoding.fork(sampled.sequence)
    worker.fork(sequences)
    for sequence, token in zip(sequences, sampled.tokens, strict=True):
        decoding.extend(sequence, array("i", [token]), [None])
    slot = sequences[gone].slot
    worker.remove(sequences[gone])
    worker.check()
    first = plan_of(worker)
    assert first is not None
    answer(worker, 60, 61)
    second = plan_of(worker)
    assert second is not None
    forked = {unpack_ints(first.forks)[at] for at in range(0, len(unpack_ints(first.forks)), 3)}
    assert slot not in forked
    assert list(unpack_ints(first.release)) == []
    assert list(unpack_ints(second.release)) == ([slot] if gone == 0 else [])


def test_a_lone_sequence_of_forks_can_end_and_leave_its_slot(arrive: Arrivals) -> None:
    waiting: list[Sequence] = []
    worker = planner(slots=1, lookahead=False, requeue=waiting.append)
    parent = arrive(6, choices=2)
    worker.admit(parent)
    plan_of(worker)
    (sampled,) = worker.accept(Result(1, 0, pack_ints([50, 51]))).sampled
    sequences = decoding.fork(sampled.sequence)
    worker.fork(sequences)
    assert waiting == [sequences[1]]
    worker.remove(parent)
    worker.check()
    assert worker.can_admit(arrive(3))


def test_results_that_do_not_fit_are_refused(arrive: Arrivals) -> None:
    worker = planner()
    worker.admit(arrive(2))
    plan_of(worker)
    with pytest.raises(ResultError, match="not the one"):
        worker.accept(Result(1, 1, pack_ints([5])))
    with pytest.raises(ResultError, match="2 samples"):
        worker.accept(Result(1, 0, pack_ints([5, 6])))
    for row in (-1, 1):
        piece = PromptLogprobs(row, 1, Logprobs(b"", b"", b""))
        with pytest.raises(ResultError, match="a row that it does not have"):
            worker.accept(Result(1, 0, pack_ints([5]), prompts=[piece]))


@pytest.mark.parametrize(
    ("most", "fields"),
    [
        (200, {}),
        (1000, {"guide": Guide("start: /" + "a" * 600 + "/")}),
        (1000, {"bad_words": (tuple(range(100)),) * 6}),
        (1000, {"logit_bias": dict.fromkeys(range(60), 1.0)}),
        (1000, {"allowed_token_ids": tuple(range(300))}),
    ],
)
def test_no_more_slots_are_opened_at_once_than_a_frame_holds(
    arrive: Arrivals, monkeypatch: pytest.MonkeyPatch, most: int, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(plan_writer, "MOST_OPENED", most)
    worker = planner()
    for _ in range(3):
        worker.admit(arrive(20, **fields))
    plans = [plan for _ in range(2) if (plan := plan_of(worker))]
    assert [(len(plan.opens), len(rows(plan))) for plan in plans] == [(2, 2), (1, 3)]


def test_what_can_never_fit(arrive: Arrivals) -> None:
    worker = planner(blocks=5)
    assert worker.capacity.fits(arrive(13, max_tokens=8).request.needs)
    assert not worker.capacity.fits(arrive(13, max_tokens=9).request.needs)
    assert planner(blocks=100).capacity.fits(arrive(73, max_tokens=7).request.needs)
    assert not planner(blocks=100).capacity.fits(arrive(73, max_tokens=8).request.needs)
    assert worker.capacity.fits(arrive(20, max_tokens=0).request.needs)


def test_a_search_needs_blocks_and_slots_for_all_its_beams(arrive: Arrivals) -> None:
    sequence = arrive(6, max_tokens=8)
    sequence.request.params = msgspec.structs.replace(sequence.request.params, beam_width=3)
    assert planner(blocks=1 + 3 * 3, slots=3).capacity.fits(sequence.request.needs)
    assert not planner(blocks=3 * 3, slots=3).capacity.fits(sequence.request.needs)
    assert not planner(blocks=1 + 3 * 3, slots=2).capacity.fits(sequence.request.needs)
    assert not planner(blocks=1 + 3 * 3, slots=3, caching=False).capacity.fits(
        sequence.request.needs
    )
    assert planner(blocks=3 * 4, slots=3, caching=False).capacity.fits(sequence.request.needs)


def test_only_beside_others_something_has_to_be_spared(arrive: Arrivals) -> None:
    worker = planner(blocks=5)
    assert worker.can_admit(arrive(20))
    worker.admit(arrive(1))
    assert worker.can_admit(arrive(12))
    assert not worker.can_admit(arrive(13))
    large = planner(blocks=300)
    large.admit(arrive(1))
    assert large.can_admit(arrive(4 * 296))
    assert not large.can_admit(arrive(4 * 296 + 1))
