"""One point of a benchmark: a warm-up, then requests under a load, and what came of them."""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

from benchmarks.loadgen.answer import Failed, Outcome, understand
from benchmarks.loadgen.load import Load
from benchmarks.loadgen.metrics import Summary, summarize
from benchmarks.loadgen.recording import Recording, Server, record
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
        warmed = await self._offer(load, warmup, f"{label}, warm-up")
        wall, cpu = perf_counter(), process_time()
        recordings = await self._offer(load, requests, label)
        busy = (process_time() - cpu) / (perf_counter() - wall)
        outcomes = [understand(recording) for recording in recordings]
        return Point(
            str(load),
            seed,
            summarize(outcomes),
            busy,
            [understand(each) for each in warmed],
            outcomes,
        )

    async def _offer(self, load: Load, requests: Sequence[Request], label: str) -> list[Recording]:
        recordings: list[Recording] = []

        def show_progress(end: str = "") -> None:
            line = f"\r{label}: {len(recordings)} of {len(requests)} done"
            print(line, end=end, file=sys.stderr, flush=True)

        async def send(request: Request, due: float) -> None:
            recordings.append(await record(self.server, request, due, self.timeout))
            show_progress()

        show_progress()
        await load.offer(requests, send, random.Random(label))
        show_progress("\n")
        return recordings
