"""The queue of the cell: who of those that wait goes first.

What has run before goes before what never ran, because a client sees it stand still: preempted
sequences, those of a lost worker, those that a gateway hands over with tokens. Among themselves
they go in the order in which they first ran, which no later decision changes; it is also the order
in which running sequences take blocks from each other, so the first of all always goes on.

New requests are served by weighted fair queueing over tenants with virtual token counters (Sheng
et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4): a tenant's counter
grows by the tokens that it was served, divided by its weight, and the tenant with the smallest
counter is next. One that had nothing waiting is lifted to the smallest counter of those that had,
so that nobody saves up service by staying away, and however much one tenant asks for, another
waits for its own requests only.

Within a tenant, priority is seconds: each level counts as having come `AGING` later. To wait is to
age, so none starves, and the order of two requests never changes while they wait. With
`--scheduling-policy fcfs` all requests come in with the same priority (`admission`).
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from pagefleet_scheduler.sequence import Request, Sequence

OUTPUT_COST = 2.0
"""Of a generated token, where one of a prompt costs 1 (section 3.1 there)."""


class Room(NamedTuple):
    """How much may wait that never ran; of several tenants that wait each has an equal share."""

    requests: int = 10_000
    tokens: int = 1 << 24
    """Of prompts."""


DEFAULT_ROOM = Room()


class Queue:
    """Sequences that wait, and what each tenant was served."""

    def __init__(self) -> None:
        self._returning: list[Sequence] = []
        self._fresh: dict[str, list[Sequence]] = {}
        """Of each tenant that has any, by their turns."""
        self._tokens: Counter[str] = Counter()
        """Of their prompts."""
        self._served: dict[str, float] = {}
        """Virtual token counters."""
        self._last_served = 0.0
        """The counter of whoever was served last."""

    def __repr__(self) -> str:
        fresh = {tenant: len(waiting) for tenant, waiting in self._fresh.items()}
        return f"<Queue {len(self._returning)} return, new: {fresh}>"

    def __len__(self) -> int:
        return len(self._returning) + sum(map(len, self._fresh.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they are to go, as of now; each may be removed before the next."""
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
        """Whether a tenant has used its share of the room, so that no more of it may wait."""
        requests, tokens = len(self._fresh.get(tenant, ())), self._tokens[tenant]
        tenants = len(self._fresh.keys() | {tenant})
        return requests * tenants >= room.requests or tokens * tenants >= room.tokens

    def charge(self, request: Request, tokens: float) -> None:
        """Count tokens that a request's tenant was served."""
        served = self._served.get(request.tenant, 0.0) + tokens / request.weight
        self._served[request.tenant] = self._last_served = served

    def check(self) -> None:
        """Assert the invariants: each sequence is at its place, and no tenant is listed in vain."""
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
