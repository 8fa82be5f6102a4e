"""The systems that the paper compares with: each request's keys and values lie in one piece.

    FasterTransformer   the earliest requests run as one batch, and are answered when all are done
    Orca (Max)          iteration-level batching (Yu et al., "Orca", OSDI 2022); 2,048 slots each
    Orca (Pow2)         the output's space is its length, rounded up to a power of two
    Orca (Oracle)       exactly what the request will need

Orca's reservations come from a buddy allocator. Both serve strictly in order of arrival.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.paper.buddy import BuddyArena, chunk_size
from benchmarks.paper.simulation import Share, Usage
from benchmarks.paper.traffic import ARENA, LONGEST, Job

Reserve = Callable[[Job], int]
"""Slots that a request reserves when it is let in."""


def largest(job: Job) -> int:
    """As many as any request may need: the output's length is not known."""
    return LONGEST


def power_of_two(job: Job) -> int:
    """At most twice the output's length."""
    return min(job.prompt + chunk_size(job.output), LONGEST)


def oracle(job: Job) -> int:
    """What it will need, which no real system knows."""
    return job.length


@dataclass(slots=True, eq=False)
class _Running:
    job: Job
    reserved: int
    address: int
    given: int = 0
    """Tokens generated."""

    @property
    def share(self) -> Share:
        """In the next step: the prompt at first, then the last token."""
        end = self.job.prompt + self.given
        return Share(range(end - 1 if self.given else 0, end), end)

    @property
    def done(self) -> bool:
        return self.given == self.job.output


class _Contiguous:
    """What both kinds of batching have in common."""

    def __init__(self) -> None:
        self._queue: deque[Job] = deque()
        self._batch: list[_Running] = []

    @property
    def running(self) -> int:
        """Requests that are in the batch."""
        return len(self._batch)

    @property
    def waiting(self) -> int:
        """Requests that are not."""
        return len(self._queue)

    def arrive(self, job: Job) -> None:
        """Take a request in."""
        self._queue.append(job)

    def usage(self) -> Usage:
        """Of the slots, during the step."""
        tokens = sum(each.job.prompt + each.given for each in self._batch)
        needed = sum(each.job.length for each in self._batch)
        reserved = sum(each.reserved for each in self._batch)
        return Usage(tokens, needed - tokens, reserved - needed, ARENA - reserved)


class Orca(_Contiguous):
    """Iteration-level batching over contiguous reservations."""

    def __init__(self, reserve: Reserve) -> None:
        super().__init__()
        self._reserve = reserve
        self._arena = BuddyArena(ARENA)

    def begin(self, now: float) -> Sequence[Share]:
        """Let in whom the arena has room for, and run everybody for one token."""
        while self._queue:
            reserved = self._reserve(self._queue[0])
            address = self._arena.allocate(reserved)
            if address is None:
                break
            self._batch.append(_Running(self._queue.popleft(), reserved, address))
        return [each.share for each in self._batch]

    def end(self, now: float) -> Iterable[tuple[Job, int]]:
        """Everybody has one token more."""
        for each in self._batch:
            each.given += 1
            if each.done:
                self._arena.free(each.address)
        given = [(each.job, 1) for each in self._batch]
        self._batch = [each for each in self._batch if not each.done]
        return given


class FasterTransformer(_Contiguous):
    """Request-level batching: a batch takes no one in before all of it are done."""

    def begin(self, now: float) -> Sequence[Share]:
        """Run the batch for one token; its answered requests cost nothing."""
        if not self._batch:
            fitting = min(ARENA // LONGEST, len(self._queue))
            self._batch = [_Running(self._queue.popleft(), LONGEST, 0) for _ in range(fitting)]
        return [each.share for each in self._batch if not each.done]

    def end(self, now: float) -> Iterable[tuple[Job, int]]:
        """All answers at once, when the longest is there."""
        for each in self._batch:
            each.given += not each.done
        if not all(each.done for each in self._batch):
            return []
        answered, self._batch = self._batch, []
        return [(each.job, each.given) for each in answered]
