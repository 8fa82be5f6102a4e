"""One point of a benchmark: a warm-up, then requests under a load, and what came of them."""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

from benchmarks.loadgen.load import Failed, Load, Outcome, attempt
from benchmarks.loadgen.metrics import Summary, summarize
from benchmarks.loadgen.stream import Server
from benchmarks.loadgen.workload import Request, Workload


@dataclass(frozen=True, slots=True)
class Point:
    """What came of a load. `generator_cpu` is the share of one core that this process took."""

    load: str
    seed: int
    summary: Summary
    generator_cpu: float
    warmup: list[Outcome]
    outcomes: list[Outcome]

    @property
    def failed(self) -> bool:
        """Whether any request failed, in the warm-up or after it."""
        return any(isinstance(outcome, Failed) for outcome in self.warmup + self.outcomes)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all points have in common; `timeout` seconds after it was sent a request has failed."""

    server: Server
    workload: Workload
    requests: int
    warmup: int
    timeout: float

    async def measure(self, load: Load, seed: int) -> Point:
        """Warm the server up with requests of the same kind, then measure."""
        label = f"{load}, seed {seed}"
        warmup = self.workload.requests(self.warmup, seed, f"warm-up of {load}")
        requests = self.workload.requests(self.requests, seed, str(load))
        warmup_outcomes = await self._offer(load, warmup, f"{label}, warm-up")
        wall, cpu = perf_counter(), process_time()
        outcomes = await self._offer(load, requests, label)
        busy = (process_time() - cpu) / (perf_counter() - wall)
        return Point(str(load), seed, summarize(outcomes), busy, warmup_outcomes, outcomes)

    async def _offer(self, load: Load, requests: Sequence[Request], label: str) -> list[Outcome]:
        outcomes: list[Outcome] = []
        progress = Progress(label, len(requests))

        async def send(request: Request, due: float) -> None:
            outcome = await attempt(self.server, request, due, self.timeout)
            outcomes.append(outcome)
            progress.add(outcome)

        await load.offer(requests, send, random.Random(label))
        progress.end()
        return outcomes


class Progress:
    """A line on standard error that counts outcomes."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._failed = 0
        self._write()

    def add(self, outcome: Outcome) -> None:
        """Count an outcome."""
        self._done += 1
        self._failed += isinstance(outcome, Failed)
        self._write()

    def end(self) -> None:
        """Leave the line as it is."""
        print(file=sys.stderr)

    def _write(self) -> None:
        line = f"\r{self._label}: {self._done} of {self._total} done, {self._failed} failed"
        print(line, end="", file=sys.stderr, flush=True)
