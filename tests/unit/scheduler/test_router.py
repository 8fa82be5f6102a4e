"""Which worker gets a sequence."""

import random
from array import array
from itertools import count

from pagefleet.params import SamplingParams
from pagefleet.wire import PROTOCOL, Result, WorkerHello, pack_ints
from pagefleet_scheduler import router
from pagefleet_scheduler.planner import Planner
from pagefleet_scheduler.sequence import Request, Sequence

NUMBERS = count()


def planner(blocks: int = 200, slots: int = 8) -> Planner:
    hello = WorkerHello(PROTOCOL, "host", 1, 1, "m", "class", 4, blocks, slots, 800, 800, 1000)
    return Planner(hello, 1, requeue=lambda sequence: None, lookahead=False)


def sequence(prompt: "array[int]") -> Sequence:
    request = Request(
        id="r",
        attempt=1,
        gateway=b"g",
        prompt=prompt,
        params=SamplingParams(max_tokens=1, seed=1),
        salt=b"",
        number=next(NUMBERS),
        arrived=0.0,
    )
    return Sequence(request, [0], prompt[:])


def prompt(length: int) -> "array[int]":
    return array("i", (random.randrange(1000) for _ in range(length)))


def compute(worker: Planner, tokens: "array[int]") -> None:
    """Leave the blocks of a prompt in a worker's cache."""
    ran = sequence(tokens)
    worker.admit(ran)
    plan = worker.plan()
    assert plan is not None
    worker.accept(Result(1, plan.step, pack_ints([1])))
    worker.remove(ran)


def test_the_one_that_has_the_least_to_feed() -> None:
    busy, idle = planner(), planner()
    busy.admit(sequence(prompt(10)))
    assert router.choose(sequence(prompt(30)), [busy, idle], router.Queued()) is idle


def test_a_cached_prefix_is_worth_a_longer_queue_but_not_any() -> None:
    cached, idle = planner(), planner()
    tokens = prompt(41)
    compute(cached, tokens)
    worth = router.MISS * 40
    cached.admit(sequence(prompt(worth - 1)))
    assert router.choose(sequence(tokens), [idle, cached], router.Queued()) is cached
    cached.admit(sequence(prompt(2)))
    assert router.choose(sequence(tokens), [idle, cached], router.Queued()) is idle


def test_one_without_room_is_passed_over() -> None:
    full, idle = planner(slots=1), planner()
    tokens = prompt(41)
    compute(full, tokens)
    full.admit(sequence(prompt(1)))
    assert router.choose(sequence(tokens), [full, idle], router.Queued()) is idle
    assert router.choose(sequence(tokens), [full], router.Queued()) is None


def test_nothing_is_counted_where_there_is_no_choice() -> None:
    worker, queued = planner(), router.Queued()
    arrived = sequence(prompt(30))
    assert router.choose(arrived, [worker], queued) is worker
    worker.admit(arrived)
    queued.admitted(arrived, worker)
    assert not queued


def test_what_is_admitted_is_counted_at_once() -> None:
    worker, queued = planner(), router.Queued()
    assert queued[worker] == 0
    for length in (30, 1, 17):
        arrived = sequence(prompt(length))
        assert router.choose(arrived, [worker], queued) is worker
        worker.admit(arrived)
        queued.admitted(arrived, worker)
        assert queued == {worker: router.Queued()[worker]}
    assert queued == {worker: 48}
