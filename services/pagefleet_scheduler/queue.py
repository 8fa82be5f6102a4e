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
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from pagefleet_scheduler.sequence import Request, Sequence

OUTPUT_COST = 2.0
"""Cost of a generated token, where one of a prompt costs 1 (section 3.1 there)."""


class Room(NamedTuple):
    """How much may wait that never ran; tenants that wait have equal shares of it."""

    requests: int = 10_000
    tokens: int = 1 << 24
    """Of their prompts."""


DEFAULT_ROOM = Room()


class Queue:
    """Sequences that wait, and what each tenant was served."""

    def __init__(self) -> None:
        self._returning: list[Sequence] = []
        self._fresh: dict[str, list[Sequence]] = {}
        """What never ran, of each tenant that has any, sorted by `turn`."""
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
        return len(self._returning) + sum(map(len, self._fresh.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they would go now; the one at hand may be removed meanwhile."""
        yield from tuple(self._returning)
        heads = [
            (self._served[tenant], waiting[0].request.turn, tenant, waiting, 0)
            for tenant, waiting in self._fresh.items()
        ]
        heapify(heads)
        while heads:
            served, _, tenant, waiting, index = heads[0]
            sequence = waiting[index]
            yield sequence
            if waiting[index : index + 1] == [sequence]:
                index += 1
            if index == len(waiting):
                heappop(heads)
                continue
            served += len(sequence.request.prompt) / sequence.request.weight
            heapreplace(heads, (served, waiting[index].request.turn, tenant, waiting, index))

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        if sequence.request.has_run:
            insort(self._returning, sequence, key=lambda waiting: waiting.order)
            return
        tenant = sequence.request.tenant
        if tenant not in self._fresh:
            others = [self._served[other] for other in self._fresh]
            floor = min(others, default=self._last_served)
            self._served[tenant] = max(self._served.get(tenant, 0.0), floor)
        insort(self._fresh.setdefault(tenant, []), sequence, key=_turn)
        self._tokens[tenant] += len(sequence.request.prompt)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence wait no longer.

        Raises:
            ValueError: it does not wait.
        """
        if sequence.request.has_run:
            self._returning.remove(sequence)
            return
        tenant = sequence.request.tenant
        waiting = self._fresh.get(tenant, [])
        waiting.remove(sequence)
        self._tokens[tenant] -= len(sequence.request.prompt)
        if not waiting:
            del self._fresh[tenant], self._tokens[tenant]

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
        assert self._returning == sorted(self._returning, key=lambda waiting: waiting.order)
        assert all(waiting.request.has_run for waiting in self._returning)
        for tenant, fresh in self._fresh.items():
            assert fresh
            assert fresh == sorted(fresh, key=_turn)
            assert all(waiting.request.tenant == tenant for waiting in fresh)
            assert not any(waiting.request.has_run for waiting in fresh)
            assert self._tokens[tenant] == sum(len(waiting.request.prompt) for waiting in fresh)
        assert self._tokens.keys() == self._fresh.keys()


def _turn(sequence: Sequence) -> tuple[float, int]:
    return sequence.request.turn, sequence.request.number
