"""A serving system under virtual time: requests arrive, steps take what a cost model says.

`simulate` alternates between asking the system for its next step and telling it that the step is
over. What arrives meanwhile waits for the step after. Systems differ only in whom they let in and
how they hold memory; the loop, the traffic and the cost of a step are the same for all.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from benchmarks.paper.traffic import ARENA, Job


class Share(NamedTuple):
    """One sequence's share of a step, as cost models see it (`pagefleet_worker.simulated`)."""

    tokens: range
    """Positions that are fed."""
    end: int


class Usage(NamedTuple):
    """What the slots of the arena are used for: token slots, or shares of the arena."""

    tokens: float
    """Hold keys and values."""
    reserved: float
    """Empty, and will be filled."""
    internal: float
    """Belong to a sequence that will never fill them."""
    external: float
    """Belong to nobody, or to nobody's request within a larger chunk."""


class System(Protocol):
    """A scheduler with its memory."""

    @property
    def running(self) -> int:
        """Requests that are in the batch."""

    @property
    def waiting(self) -> int:
        """Requests that are not."""

    def arrive(self, job: Job) -> None:
        """Take a request in."""

    def begin(self, now: float) -> Sequence[Share]:
        """Begin the next step; empty if there is nothing to do."""

    def end(self, now: float) -> Iterable[tuple[Job, int]]:
        """The step is over: who was given how many tokens."""

    def usage(self) -> Usage:
        """Of the slots, during the step."""


Cost = Callable[[Sequence[Share]], float]
"""Seconds that a step takes."""


@dataclass(slots=True)
class Average:
    """Over time; NaN of no time at all."""

    seconds: float = 0.0
    batch_seconds: float = 0.0
    slot_seconds: Usage = field(default_factory=lambda: Usage(0, 0, 0, 0))

    def hold(self, system: System, seconds: float) -> None:
        """The system stays as it is for a while."""
        self.seconds += seconds
        self.batch_seconds += seconds * system.running
        held = zip(self.slot_seconds, system.usage(), strict=True)
        self.slot_seconds = Usage(*(before + seconds * now for before, now in held))

    @property
    def batch(self) -> float:
        """Requests in the batch."""
        return self._of(self.batch_seconds)

    @property
    def usage(self) -> Usage:
        """Shares of the arena."""
        return Usage(*(self._of(each) / ARENA for each in self.slot_seconds))

    def _of(self, whole: float) -> float:
        return whole / self.seconds if self.seconds else math.nan


@dataclass(slots=True)
class Measures:
    """What a run showed."""

    latencies: "array[float]" = field(default_factory=lambda: array("d"))
    """Of each request, seconds from arrival to end, divided by its output tokens."""
    first_tokens: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds from arrival to the first token."""
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds between two tokens of a request."""
    overall: Average = field(default_factory=Average)
    """Until the last arrival."""
    full: Average = field(default_factory=Average)
    """The part of it in which requests waited for memory."""

    @property
    def latency(self) -> float:
        """The paper's normalized latency: mean seconds a token."""
        return sum(self.latencies) / len(self.latencies)


def simulate(system: System, jobs: Sequence[Job], cost: Cost, *, drain: bool = True) -> Measures:
    """Serve all jobs, which are in order of arrival; without `drain`, only until the last comes."""
    measures = Measures()
    arrivals = deque(jobs)
    given = dict.fromkeys(jobs, 0)
    last: dict[Job, float] = {}
    now = 0.0
    while arrivals or (drain and (system.running or system.waiting)):
        shares = system.begin(now)
        until = now + cost(shares) if shares else arrivals[0].arrives
        if arrivals:
            measures.overall.hold(system, until - now)
        if arrivals and system.waiting:
            measures.full.hold(system, until - now)
        now = until
        while arrivals and arrivals[0].arrives <= now:
            system.arrive(arrivals.popleft())
        for job, tokens in system.end(now) if shares else ():
            if given[job]:
                measures.gaps.append(now - last[job])
            else:
                measures.first_tokens.append(now - job.arrives)
            given[job] += tokens
            last[job] = now
            if given[job] == job.output:
                measures.latencies.append((now - job.arrives) / job.output)
    return measures
