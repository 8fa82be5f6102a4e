"""Who goes first: fairness between tenants, aging within one, and first of all who ran before."""

import random
from array import array
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    ChoiceState,
    Join,
    Plan,
    Reason,
    Rejected,
    Result,
    Submit,
    WorkerHello,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.capacity import Capacity
from pagefleet_scheduler.core import Arrived, Scheduler
from pagefleet_scheduler.queue import OUTPUT_COST, Capacities, Queue, Room
from pagefleet_scheduler.sequence import AGING, Request, Sequence

NUMBERS = count()


def waiting(
    tenant: str = "",
    *,
    prompt: int = 10,
    arrived: float = 0.0,
    priority: int = 0,
    weight: float = 1.0,
    began: float | None = None,
) -> Sequence:
    number = next(NUMBERS)
    request = Request(
        id=f"{tenant}{number}",
        attempt=1,
        gateway=b"g",
        prompt=array("i", range(prompt)),
        params=SamplingParams(max_tokens=8, seed=1),
        salt=b"",
        number=number,
        arrived=arrived,
        priority=priority,
        tenant=tenant,
        weight=weight,
        began=began,
    )
    return Sequence(request, [0], request.prompt[:])


def anywhere(_: Sequence) -> Capacities:
    return frozenset()


def queue_of(*sequences: Sequence) -> Queue:
    queue = Queue(anywhere)
    for sequence in sequences:
        queue.add(sequence)
        queue.check()
    return queue


def serve_next(queue: Queue, outputs: int) -> tuple[str, float]:
    """Serve one request whole; returns its tenant, and its cost by weight."""
    sequence = next(iter(queue))
    queue.remove(sequence)
    queue.check()
    request = sequence.request
    cost = len(request.prompt) + OUTPUT_COST * outputs
    queue.charge(request, cost)
    return request.tenant, cost / request.weight


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_tenants_that_always_wait_are_served_by_weight(weights: list[float], seed: int) -> None:
    """Their services, by weight, never lie further apart than one request of either costs."""
    rng, queue = random.Random(seed), Queue(anywhere)
    most = (60 + OUTPUT_COST * 50) / min(weights)
    served = {str(number): 0.0 for number in range(len(weights))}
    for tenant, weight in zip(served, weights, strict=True):
        for _ in range(40):
            queue.add(waiting(tenant, prompt=rng.randint(1, 60), weight=weight))
    for _ in range(40):
        tenant, cost = serve_next(queue, rng.randint(0, 50))
        served[tenant] += cost
        assert max(served.values()) - min(served.values()) <= most


def test_the_order_of_a_look_is_that_of_serving() -> None:
    """Where outputs cost nothing, to look ahead is to know."""
    rng = random.Random()
    listed = [
        waiting(rng.choice("abc"), prompt=rng.randint(1, 30), weight=rng.choice([1.0, 3.0]))
        for _ in range(30)
    ]
    weight = {"a": 1.0, "b": 3.0, "c": 2.0}
    for sequence in listed:
        sequence.request.weight = weight[sequence.request.tenant]
    queue = queue_of(*listed)
    foreseen = list(queue)
    assert len(foreseen) == len(queue) == 30
    assert [serve_next(queue, 0)[0] for _ in listed] == [each.request.tenant for each in foreseen]
    assert not list(queue)


def test_those_that_leave_during_a_look_change_nothing_for_those_after_them() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    queue = queue_of(*(waiting(rng.choice("abc"), prompt=rng.randint(1, 9)) for _ in range(30)))
    foreseen, seen = list(queue), []
    for sequence in queue:
        seen.append(sequence)
        if rng.random() < 0.5:
            queue.remove(sequence)
    assert seen == foreseen, seed


def test_nobody_saves_up_service_by_staying_away() -> None:
    queue = queue_of(*(waiting("busy") for _ in range(50)))
    for _ in range(20):
        serve_next(queue, 10)
    for _ in range(20):
        queue.add(waiting("late"))
    tenants = [serve_next(queue, 10)[0] for _ in range(20)]
    assert tenants.count("late") == 10


def test_who_comes_late_is_lifted_to_the_least_served_of_those_that_wait() -> None:
    greedy, modest, late = waiting("greedy"), waiting("modest"), waiting("late")
    queue = queue_of(greedy, modest)
    queue.charge(greedy.request, 1000)
    queue.add(late)
    assert list(queue) == [late, modest, greedy]


def test_who_comes_to_an_empty_queue_is_lifted_to_whoever_was_served_last() -> None:
    served, queue = waiting("busy"), Queue(anywhere)
    queue.charge(served.request, 1000)
    for tenant in ("late", "late", "busy", "busy"):
        queue.add(waiting(tenant))
    assert [each.request.tenant for each in queue] == ["busy", "late", "busy", "late"]


def test_priority_counts_for_those_that_ran_before_too() -> None:
    low, plain = waiting(began=100.0, priority=1), waiting(began=99.0 + AGING)
    lowest = waiting(began=99.0, priority=2)
    assert list(queue_of(lowest, low, plain)) == [plain, low, lowest]


def test_nobody_loses_its_debt_by_a_pause() -> None:
    queue = queue_of(waiting("greedy", prompt=1000), waiting("modest"))
    serve_next(queue, 0)
    serve_next(queue, 0)
    for _ in range(5):
        queue.add(waiting("modest"))
    queue.add(waiting("greedy"))
    assert [serve_next(queue, 0)[0] for _ in range(6)] == ["modest"] * 5 + ["greedy"]


def test_a_level_of_priority_is_worth_so_many_seconds() -> None:
    late = waiting(priority=1, arrived=100.0)
    before, after = waiting(arrived=99.0 + AGING), waiting(arrived=101.0 + AGING)
    urgent = waiting(priority=-2, arrived=100.5 + 3 * AGING)
    assert list(queue_of(after, before, urgent, late)) == [before, late, urgent, after]


def test_who_is_urgent_passes_who_came_a_little_before() -> None:
    plain, urgent = waiting(arrived=0.0), waiting(priority=-1, arrived=10.0)
    assert list(queue_of(plain, urgent)) == [urgent, plain]


def test_a_tenants_priority_does_not_move_others() -> None:
    urgent = [waiting("a", priority=-100) for _ in range(3)]
    plain = [waiting("b", arrived=1.0) for _ in range(3)]
    tenants = [each.request.tenant for each in queue_of(*urgent, *plain)]
    assert tenants == ["a", "b", "a", "b", "a", "b"]


def test_who_ran_goes_first_in_the_order_of_its_first_run() -> None:
    fresh = waiting("a", arrived=0.0, priority=-1)
    first, second = waiting("b", arrived=9.0, began=10.0), waiting("a", arrived=1.0, began=11.0)
    assert list(queue_of(second, fresh, first)) == [first, second, fresh]


def test_what_does_not_wait_cannot_be_removed() -> None:
    queue, sequence = queue_of(waiting("a")), waiting("a")
    for stranger in (sequence, waiting("b"), waiting("a", began=1.0)):
        with pytest.raises(KeyError):
            queue.remove(stranger)


def test_a_full_queue_has_room_for_a_tenants_equal_share() -> None:
    queue = queue_of(*(waiting("a") for _ in range(8)))
    assert queue.is_full_for("a", Room(8))
    for _ in range(4):
        assert not queue.is_full_for("b", Room(8))
        queue.add(waiting("b"))
    assert queue.is_full_for("b", Room(8))


def test_so_many_tokens_of_prompts_may_wait() -> None:
    queue, room = queue_of(), Room(tokens=100)
    for _ in range(10):
        assert not queue.is_full_for("a", room)
        queue.add(waiting("a", prompt=10))
    assert queue.is_full_for("a", room)
    queue.remove(next(iter(queue)))
    queue.check()
    assert not queue.is_full_for("a", room)


class TestScheduler:
    """The same, as clients of a cell with one slot see it."""

    def setup_method(self) -> None:
        self.begin()

    def begin(self, prioritized: bool = True) -> None:
        self.scheduler = Scheduler(
            1 << 20, check=True, lookahead=False, room=Room(20), prioritized=prioritized
        )
        hello = WorkerHello(PROTOCOL, "host", 1, 1, "m", "class", 4, 50, 1, 100, 64, 1000)
        sends = self.scheduler.handle([Arrived(b"w", hello)], 0.0)
        self.epoch = next(send.message.epoch for send in sends if isinstance(send.message, Join))
        self.plans: list[Plan] = []
        self.order: list[int] = []
        """Prompts' first tokens in the order in which they began to be computed."""

    def submit(
        self,
        name: str,
        token: int,
        tenant: str,
        *,
        prompt: int = 3,
        had: tuple[int, ...] = (),
        weight: float = 1.0,
        priority: int = 0,
    ) -> list[Rejected]:
        submit = Submit(
            name,
            1,
            pack_ints([token] + [next(NUMBERS) % 1000] * (prompt - 1)),
            SamplingParams(max_tokens=len(had) + 1, seed=1),
            [ChoiceState(0, pack_ints(had))],
            tenant=tenant,
            weight=weight,
            priority=priority,
        )
        return self.handle(Arrived(b"g", submit))

    def handle(self, *events: Arrived) -> list[Rejected]:
        sent = [send.message for send in self.scheduler.handle(events, 0.0)]
        self.plans += [message for message in sent if isinstance(message, Plan)]
        return [message for message in sent if isinstance(message, Rejected)]

    def work(self) -> None:
        while self.plans:
            plan = self.plans.pop(0)
            self.order.append(unpack_ints(plan.tokens)[0])
            result = Result(self.epoch, plan.step, pack_ints([1]))
            self.handle(Arrived(b"w", result))

    def test_a_flood_delays_another_tenant_by_what_runs_already(self) -> None:
        for number in range(12):
            self.submit(f"a{number}", 1, "a")
        for number in range(3):
            self.submit(f"b{number}", 2, "b")
        self.work()
        assert self.order == [1, 2, 1, 2, 1, 2] + [1] * 9

    def test_a_weight_is_a_share(self) -> None:
        self.submit("first", 9, "other")
        for number in range(9):
            self.submit(f"a{number}", 1, "a", weight=2.0)
            self.submit(f"b{number}", 2, "b")
        self.work()
        assert abs(self.order[1:10].count(1) - 6) <= 1

    def test_prompts_count_as_well(self) -> None:
        self.submit("first", 9, "other")
        for number in range(4):
            self.submit(f"a{number}", 1, "a", prompt=30)
            self.submit(f"b{number}", 2, "b", prompt=10)
        self.work()
        assert self.order == [9, 1, 2, 2, 2, 1, 2, 1, 1]

    def test_priority_counts_unless_the_policy_is_first_come_first_served(self) -> None:
        for prioritized, order in ((True, [5, 3, 4, 2, 1, 0]), (False, [0, 1, 2, 3, 4, 5])):
            self.begin(prioritized)
            self.submit("first", 9, "a")
            for number, priority in enumerate((3, 2, 1, 0, 0, -7)):
                self.submit(f"a{number}", number, "a", priority=priority)
            self.work()
            assert self.order == [9, *order]

    def test_who_comes_with_tokens_has_run_and_goes_first(self) -> None:
        for number in range(4):
            self.submit(f"a{number}", 1, "a")
        self.submit("back", 2, "a", had=(5,))
        self.work()
        assert self.order == [1, 2, 1, 1, 1]

    def test_a_flood_is_refused_and_others_are_not(self) -> None:
        for number in range(21):
            assert not self.submit(f"a{number}", 1, "a")
        (refusal,) = self.submit("a", 1, "a")
        assert refusal.reason is Reason.OVERLOADED
        assert not self.submit("b", 2, "b")


def test_who_waits_for_reserved_workers_only_is_passed_over() -> None:
    rng = random.Random(seed := random.randrange(2**32))
    kinds = [Capacity(80, blocks, 4, 8, True, 1) for blocks in range(3)]
    capacities: dict[Sequence, Capacities] = {}
    queue = Queue(capacities.__getitem__)
    for _ in range(200):
        began = rng.choice([None, rng.random()])
        sequence = waiting("tenant", arrived=rng.random(), began=began)
        capacities[sequence] = frozenset(rng.sample(kinds, rng.randrange(4)))
        queue.add(sequence)
    for _ in range(3):
        queue.check()
        order, stays = list(queue), {each: rng.random() < 0.5 for each in capacities}
        reserved, expected = set[Capacity](), []
        for each in order:
            if not reserved.issuperset(capacities[each]):
                expected.append(each)
                reserved.update(capacities[each] if stays[each] else ())
        met, reserved, in_vain = [], set(), 0
        for each in queue.walk(reserved):
            if reserved.issuperset(capacities[each]):
                in_vain += 1
                continue
            met.append(each)
            if stays[each]:
                reserved.update(capacities[each])
            else:
                queue.remove(each)
        assert met == expected, seed
        assert in_vain <= 2 * len({*capacities.values()}), "at most the next of each list"
        assert list(queue) == [each for each in order if each not in met or stays[each]], seed
        for each in capacities:
            capacities[each] = frozenset(rng.sample(kinds, rng.randrange(4)))
        queue.regroup()
