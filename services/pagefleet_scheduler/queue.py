"""The queue of the cell: which of the waiting sequences goes first.

Sequences that have run before go before those that never ran, because their clients see them stand
still: preempted ones, those of a lost worker, those that a gateway submits again with tokens. Among
themselves they go in the order in which they first ran, which no later decision changes. Running
sequences take blocks from each other in the same order, so that the first of all always goes on.

New requests are served by weighted fair queueing over tenants with virtual token counters (Sheng
et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4): a tenant's counter
grows by the tokens that it was served, divided by its weight, and the tenant with the smallest
counter is next. A tenant that had nothing waiting is lifted to the smallest counter of those that
had, so that nobody saves up service by staying away. However much one tenant asks for, the others
wait for their own requests only.

Within a tenant, a level of priority is worth seconds: the request counts as having arrived `AGING`
later. Whoever waits gets ahead of later arrivals of any priority in the end, so none starves, and
two waiting requests never change places. With `--scheduling-policy fcfs` all requests come in with
the same priority (`admission`).

Workers may differ, so that a sequence may have to wait for some of them while others have room. To
find who comes next there, without a look at all who wait for the former, the queue keeps sequences
apart that wait for workers of different capacities.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace, merge
from typing import Any, NamedTuple, TypeAlias

from pagefleet_scheduler.capacity import Capacity
from pagefleet_scheduler.sequence import Request, Sequence

OUTPUT_COST = 2.0
"""Cost of a generated token, where one of a prompt costs 1 (section 3.1 there)."""


class Room(NamedTuple):
    """How much may wait that never ran; tenants that wait have equal shares of it."""

    requests: int = 10_000
    tokens: int = 1 << 24
    """Of their prompts."""


DEFAULT_ROOM = Room()

Capacities: TypeAlias = frozenset[Capacity]
"""Of the workers for which a sequence waits."""


class _Line:
    """Sequences in the order of a key, kept apart by the capacities for which they wait."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        self._key = key
        self._lists: dict[Capacities, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lists.values()))

    def add(self, sequence: Sequence, capacities: Capacities) -> None:
        insort(self._lists.setdefault(capacities, []), sequence, key=self._key)

    def remove(self, sequence: Sequence, capacities: Capacities) -> None:
        self._lists[capacities].remove(sequence)
        if not self._lists[capacities]:
            del self._lists[capacities]

    def walk(self, reserved: set[Capacity] | None) -> Iterator[Sequence]:
        """As `Queue.walk`, but none may be added meanwhile."""
        return merge(*(_walk(*each, reserved) for each in self._lists.items()), key=self._key)

    def regroup(self, capacities: Mapping[Sequence, Capacities]) -> None:
        before, self._lists = self._lists, {}
        for waiting in before.values():
            for sequence in waiting:
                self._lists.setdefault(capacities[sequence], []).append(sequence)
        for waiting in self._lists.values():
            waiting.sort(key=self._key)

    def copy(self) -> "_Line":
        line = _Line(self._key)
        line._lists = {capacities: waiting.copy() for capacities, waiting in self._lists.items()}
        return line

    def check(self) -> list[Sequence]:
        """Assert the invariants; returns all sequences."""
        for waiting in self._lists.values():
            assert waiting
            assert waiting == sorted(waiting, key=self._key)
        return [sequence for waiting in self._lists.values() for sequence in waiting]


def _walk(
    capacities: Capacities, waiting: list[Sequence], reserved: set[Capacity] | None
) -> Iterator[Sequence]:
    index = 0
    while index < len(waiting) and (reserved is None or not reserved.issuperset(capacities)):
        sequence = waiting[index]
        yield sequence
        index += index < len(waiting) and waiting[index] is sequence


class Queue:
    """Sequences that wait, and what each tenant was served.

    `capacities_of` says for which workers a sequence waits; `regroup` has to be called when that
    changes.
    """

    def __init__(self, capacities_of: Callable[[Sequence], Capacities]) -> None:
        self._capacities_of = capacities_of
        self._capacities: dict[Sequence, Capacities] = {}
        """Of all that wait."""
        self._returning = _Line(_order)
        self._fresh: dict[str, _Line] = {}
        """What never ran, of each tenant that has any."""
        self._tokens: Counter[str] = Counter()
        """Of the prompts of these."""
        self._served: dict[str, float] = {}
        """The tenants' virtual token counters."""
        self._last_served = 0.0
        """The counter of the tenant that was served last."""

    def __repr__(self) -> str:
        fresh = {tenant: len(waiting) for tenant, waiting in self._fresh.items()}
        return f"<Queue {len(self._returning)} return, new: {fresh}>"

    def __len__(self) -> int:
        return len(self._capacities)

    def __iter__(self) -> Iterator[Sequence]:
        return self.walk(None)

    def capacities(self, sequence: Sequence) -> Capacities:
        """For which a sequence waits."""
        return self._capacities[sequence]

    def walk(self, reserved: set[Capacity] | None) -> Iterator[Sequence]:
        """Sequences in the order in which they would go now.

        The one at hand may be removed before the next. Leaves out those that wait for workers of
        none but the `reserved` capacities, which may become more meanwhile; None leaves out none.
        """
        if self._returning:
            yield from self._returning.copy().walk(reserved)  # what is preempted meanwhile is added
        heads = []
        for tenant, line in self._fresh.items():
            waiting = line.walk(reserved)
            if (sequence := next(waiting, None)) is not None:
                turn = sequence.request.turn
                heads.append((self._served[tenant], turn, tenant, sequence, waiting))
        heapify(heads)
        while heads:
            served, _, tenant, sequence, waiting = heads[0]
            yield sequence
            following = next(waiting, None)
            if following is None:
                heappop(heads)
                continue
            served += len(sequence.request.prompt) / sequence.request.weight
            heapreplace(heads, (served, following.request.turn, tenant, following, waiting))

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        request, tenant = sequence.request, sequence.request.tenant
        capacities = self._capacities[sequence] = self._capacities_of(sequence)
        if request.has_run:
            self._returning.add(sequence, capacities)
            return
        if tenant not in self._fresh:
            others = [self._served[other] for other in self._fresh]
            floor = min(others, default=self._last_served)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
            self._fresh[tenant] = _Line(_turn)
        self._fresh[tenant].add(sequence, capacities)
        self._tokens[tenant] += len(request.prompt)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence wait no longer.

        Raises:
            KeyError: it does not wait.
        """
        capacities, request = self._capacities.pop(sequence), sequence.request
        if request.has_run:
            self._returning.remove(sequence, capacities)
            return
        self._fresh[request.tenant].remove(sequence, capacities)
        self._tokens[request.tenant] -= len(request.prompt)
        if not self._fresh[request.tenant]:
            del self._fresh[request.tenant], self._tokens[request.tenant]

    def regroup(self) -> None:
        """Find out anew for which workers each sequence waits."""
        self._capacities = {
            sequence: self._capacities_of(sequence) for sequence in self._capacities
        }
        for line in (self._returning, *self._fresh.values()):
            line.regroup(self._capacities)

    def is_full_for(self, tenant: str, room: Room) -> bool:
        """Whether a tenant has used up its share of the room."""
        requests, tokens = len(self._fresh.get(tenant, ())), self._tokens[tenant]
        tenants = len(self._fresh.keys() | {tenant})
        return requests * tenants >= room.requests or tokens * tenants >= room.tokens

    def charge(self, request: Request, tokens: float) -> None:
        """Count tokens that a request's tenant was served."""
        served = self._served.get(request.tenant, 0.0) + tokens / request.weight
        self._served[request.tenant] = self._last_served = served

    def check(self) -> None:
        """Assert the invariants: lists are sorted, counts are right, and no list is empty."""
        listed = self._returning.check()
        assert all(waiting.request.has_run for waiting in listed)
        for tenant, line in self._fresh.items():
            fresh = line.check()
            assert fresh
            assert all(waiting.request.tenant == tenant for waiting in fresh)
            assert not any(waiting.request.has_run for waiting in fresh)
            assert self._tokens[tenant] == sum(len(waiting.request.prompt) for waiting in fresh)
            listed += fresh
        assert self._tokens.keys() == self._fresh.keys()
        assert len(listed) == len(self)
        assert all(self._capacities[each] == self._capacities_of(each) for each in listed)


def _order(sequence: Sequence) -> tuple[tuple[float, int], int]:
    return sequence.order


def _turn(sequence: Sequence) -> tuple[float, int]:
    return sequence.request.turn, sequence.request.number
