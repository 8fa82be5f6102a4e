"""Whether a worker lives, judged by its beats: silence, a hang, a plan without an answer.

Three layers: the connection (`WORKER_SILENCE` without a word, longer for a worker that was seen to
be late); the progress of the thread that computes, which the beats carry, so that a process that
answers but does not compute is found out (`WORKER_HANG`, or four times the slowest layer seen); and
each plan, which an idle worker must have answered (after `REPEAT_AFTER` it is sent once more, then
the worker is given up). Time in which the scheduler itself was stopped, and could hear nobody, does
not count (`excuse`).
"""

from dataclasses import dataclass
from math import inf

from pagefleet.wire import EngineStats, Plan, WorkerBeat
from pagefleet_scheduler.planner import Planner

WORKER_SILENCE = 1.0
"""Seconds without a word after which a worker is lost, at least."""

LONGEST_SILENCE = 1.5
"""The same at most; in between, twice the longest pause between two words of this worker."""

FIRST_WORD = 2.0
"""Seconds that a worker has to say something under a new epoch."""

WORKER_HANG = 1.0
"""Seconds without progress after which a busy worker hangs, at least."""

REPEAT_AFTER = 1.0
"""Seconds after which a plan that an idle worker has not answered is sent once more."""


@dataclass(slots=True)
class Worker:
    """A member of the cell: its planner, and what was last heard of it."""

    number: int
    """Tells the workers of this scheduler apart."""
    planner: Planner
    heard: float
    """When it last said something under its epoch."""
    progressed: float
    pause: float = 0.0
    """Longest time between two words of it, in seconds."""
    progress: int = 0
    slowest: float = 0.0
    """Longest time between two advances of its progress while busy, in seconds."""
    busy: bool = False
    unreached: bool = False
    """A message could not be sent to it, and is repeated when it is heard."""
    confirmed: bool = False
    """It has said something under its epoch."""

    @property
    def due(self) -> float:
        """When to order its next step: at once if it is idle, never while enough is under way."""
        flights = self.planner.flights
        if len(flights) >= self.planner.depth:
            return inf
        return self.planner.pace.due(flights[-1]) if flights else -inf

    def may_not_know(self, now: float) -> bool:
        """Whether it was let in so lately that what it says may be older than that."""
        return not self.confirmed and now - self.progressed <= FIRST_WORD

    def hear(self, now: float) -> None:
        """It said something under its epoch."""
        if self.confirmed:
            self.pause = max(self.pause, now - self.heard)
        self.confirmed, self.heard = True, now

    def excuse(self, seconds: float) -> None:
        """Discount a time in which nothing could be heard."""
        self.heard += seconds
        self.progressed += seconds
        self.planner.pace.excuse(seconds)
        for flight in self.planner.flights:
            flight.sent += seconds

    def beat(self, beat: WorkerBeat, now: float) -> bool:
        """Note how far the computing thread is; returns whether it advanced since the last beat."""
        self.hear(now)
        advanced = beat.progress != self.progress
        if advanced or not beat.busy:
            if self.busy:
                self.slowest = max(self.slowest, now - self.progressed)
            self.progress, self.progressed = beat.progress, now
        self.busy = beat.busy
        return advanced

    def silent(self, now: float) -> bool:
        """Whether it was not heard for too long."""
        limit = max(WORKER_SILENCE, min(2 * self.pause, LONGEST_SILENCE))
        return now - self.heard > (limit if self.confirmed else FIRST_WORD)

    def hangs(self, now: float) -> bool:
        """Whether it is busy, but has made no progress for too long."""
        return self.busy and now - self.progressed > max(WORKER_HANG, 4 * self.slowest)

    def overdue(self, now: float) -> list[Plan]:
        """Plans to send once more to a worker that says it is idle.

        Raises:
            TimeoutError: one was sent twice already.
        """
        if self.busy:
            return []
        late = [flight for flight in self.planner.flights if now - flight.sent >= REPEAT_AFTER]
        for flight in late:
            if flight.repeated:
                raise TimeoutError(f"Step {flight.plan.step} is not answered.")
            flight.sent, flight.repeated = now, True
        return [flight.plan for flight in late]

    def stats(self) -> EngineStats:
        """Its figures."""
        planner, pool, host = self.planner, self.planner.cache.pool, self.planner.cache.host
        return EngineStats(
            engine=self.number,
            running=len(planner.running),
            blocks=pool.blocks,
            used_blocks=pool.held,
            cached_blocks=pool.cached,
            prefix_queries=planner.prefix_queries,
            prefix_hits=planner.prefix_hits,
            preemptions=planner.preemptions,
            swapped_out=host.moved_out,
            swapped_in=host.moved_in,
            drafted=planner.speculation.drafted,
            drafts_kept=planner.speculation.kept,
            block_size=planner.worker.block_size,
        )
