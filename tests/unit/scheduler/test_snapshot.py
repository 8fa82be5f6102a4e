"""Memory, explained: pools and waiting sequences in situations that are known block by block."""

import random
from collections import Counter

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    CACHED_BLOCK,
    PROTOCOL,
    GatewayHello,
    Inspect,
    Snapshot,
    Wait,
    WorkerMemory,
)
from pagefleet_scheduler.core import Arrived, Scheduler
from pagefleet_scheduler.snapshot import take_snapshot
from tests.echo_cell import EchoCell


def look(cell: EchoCell, blocks: bool = True) -> Snapshot:
    """As `Scheduler.handle` answers an `Inspect`."""
    planners = dict(enumerate(cell.scheduler.placement.planners))
    inspect = Inspect(7, blocks)
    return take_snapshot(1, inspect, planners, cell.scheduler.placement, cell.now)


def greedy(tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=1, temperature=0.0, **fields)  # type: ignore[arg-type]


def test_the_scheduler_answers_once_it_has_planned() -> None:
    scheduler = Scheduler(5)
    sends = scheduler.handle(
        [Arrived(b"g", GatewayHello(PROTOCOL)), Arrived(b"top", Inspect(9))], 0.0
    )
    assert [send.message for send in sends if send.peer == b"top"] == [Snapshot(5, 9, [], [])]


def test_every_block_has_one_state_and_the_map_tells_it() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    cell = EchoCell(blocks=30)
    worker = cell.join()
    for _ in range(60):
        if rng.random() < 0.3:
            prompt = [rng.randrange(200) for _ in range(rng.randrange(1, 30))]
            cell.submit(prompt, greedy(rng.randrange(1, 20)), choices=rng.randrange(1, 4))
        cell.step(worker)
        (memory,) = look(cell).workers
        planner = cell.scheduler.placement.planners[0]
        assert memory.free + memory.cached + sum(memory.holders.values()) == 30, seed
        assert sum(n * count for n, count in memory.holders.items()) == sum(
            len(stream.table) for stream in planner.running
        ), seed
        states = Counter(memory.map)
        assert states[0] == memory.free, seed
        assert states[CACHED_BLOCK] == memory.cached, seed
        assert {n: count for n, count in states.items() if 0 < n < CACHED_BLOCK} == memory.holders
        written = {
            (stream.table[position // 4], position % 4)
            for stream in planner.running
            for position in range(stream.ordered)
        }
        assert memory.empty_slots == 4 * sum(memory.holders.values()) - len(written), seed


def test_samples_share_their_prompt_and_copy_its_last_block() -> None:
    """Two full blocks and a third with one token; three samples write into it, two of them copy."""
    cell = EchoCell(blocks=30, lookahead=False)
    worker = cell.join()
    cell.submit(list(range(9)), greedy(3), choices=3)
    (before,) = look(cell).workers
    assert (before.holders, before.empty_slots, before.copies) == ({1: 3}, 3, 0)
    cell.step(worker)
    (after,) = look(cell, blocks=False).workers
    assert (after.holders, after.empty_slots, after.copies) == ({1: 3, 3: 2}, 6, 2)
    assert after.map == b""
    cell.run()
    (idle,) = look(cell).workers
    assert (idle.holders, idle.empty_slots, idle.running) == ({}, 0, 0)
    assert idle.cached > 0


def test_why_sequences_wait() -> None:
    cell = EchoCell(blocks=10, slots=2)
    cell.submit([1] * 20, greedy(5))
    assert [each.reason for each in look(cell).waiting] == [Wait.WORKER]
    cell.join()
    cell.now = 1.0
    cell.submit([2] * 20, greedy(5))
    cell.submit([3] * 8, greedy(5))
    first, second = look(cell).waiting
    assert (first.reason, first.wanted, first.available) == (Wait.BLOCKS, 6, 4)
    assert (first.tokens, first.losses, first.seconds, first.choices) == (20, 0, 0.0, [0])
    assert second.reason is Wait.TURN


def test_whose_turn_it_is_at_one_worker_and_not_at_another() -> None:
    cell = EchoCell(blocks=20, slots=1)
    cell.join()
    cell.submit([1] * 60, greedy(5))
    cell.submit([2] * 60, greedy(5))
    cell.make_engine = lambda: EchoCell(blocks=5, slots=1).make_engine()
    cell.join()
    cell.submit([3] * 8, greedy(5))
    cell.submit([4] * 60, greedy(5))
    cell.submit([5] * 8, greedy(5))
    reasons = [(each.tokens, each.reason) for each in look(cell).waiting]
    assert reasons == [(60, Wait.SLOT), (60, Wait.TURN), (8, Wait.SLOT)]


def test_a_sequence_that_every_slot_is_taken_from_waits_for_a_slot() -> None:
    cell = EchoCell(blocks=40, slots=1)
    cell.join()
    for _ in range(2):
        cell.submit([1] * 4, greedy(5))
    assert [each.reason for each in look(cell).waiting] == [Wait.SLOT]


def test_what_was_preempted_says_how_often() -> None:
    cell = EchoCell(blocks=12, slots=4)
    worker = cell.join()
    for first in range(3):
        cell.submit([first] * 12, greedy(30))
    losses = 0
    while not losses:
        assert cell.step(worker)
        losses = max((each.losses for each in look(cell).waiting), default=0)
    (memory,) = look(cell).workers
    assert memory.preemptions >= 1
    cell.run()
    cell.compare()


def test_large_sharing_fits_a_byte_of_the_map() -> None:
    assert WorkerMemory.__struct_fields__[-1] == "map"
    cell = EchoCell(blocks=40, slots=16)
    worker = cell.join()
    cell.submit([5] * 8, greedy(4), choices=16)
    cell.step(worker)
    (memory,) = look(cell).workers
    assert memory.holders[16] == 2
    assert max(memory.map) == 16
