"""Pagefleet's scheduler as a system of the simulation: the core that serves, block manager and all.

The device is the cost model; what it samples is noise. Everything else is real: requests come as
`Submit`, steps go out as `Plan` and come back as `Result`, tokens arrive in `Outputs`.
"""

import random
from collections.abc import Callable, Iterable, Sequence

from benchmarks.paper.simulation import Share, Usage
from benchmarks.paper.traffic import ARENA, LONGEST, Job
from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    ROW_FIELDS,
    ChoiceState,
    GatewayHello,
    Logprobs,
    Output,
    Outputs,
    Plan,
    Rejected,
    Result,
    Submit,
    WorkerBeat,
    WorkerHello,
    unpack_ints,
)
from pagefleet_scheduler.core import Arrived, Scheduler
from pagefleet_scheduler.flights import PlannedRow
from pagefleet_scheduler.queue import Room
from pagefleet_scheduler.sequence import Sequence as Stream

GATEWAY, WORKER = b"gateway", b"worker"

BATCHED_TOKENS = 2_560
"""Input tokens of a step, at most."""

Candidates = Callable[[Stream], Logprobs]
"""What the device says of a beam's next token."""


def no_beams(stream: Stream) -> Logprobs:
    """For traffic without beam search."""
    raise ValueError("This traffic was to have no beam search.")


class Paged:
    """One worker of the paper's size, under the real scheduler.

    Args:
        params: what a job asks for; by default one sampled answer of the job's length.
        choices: answers to each job.
        candidates: scores for beams.
    """

    def __init__(
        self,
        params: Callable[[Job], SamplingParams] = lambda job: SamplingParams(
            max_tokens=job.output, seed=0
        ),
        *,
        choices: int = 1,
        candidates: Candidates = no_beams,
        block_size: int = 16,
        caching: bool = False,
    ) -> None:
        self._params = params
        self._choices = [ChoiceState(number) for number in range(choices)]
        self._candidates = candidates
        self._rng = random.Random(0)
        self._jobs: dict[str, Job] = {}
        self._arrived: list[Job] = []
        self._plan: Plan | None = None
        self._scheduler = Scheduler(
            1 << 30,
            lookahead=False,
            caching=caching,
            room=Room(1 << 30, 1 << 60),
            worker_wait=float("inf"),
        )
        blocks = ARENA // block_size
        hello = WorkerHello(
            PROTOCOL, "", 0, 0, "opt-13b", "", block_size, blocks, blocks, LONGEST + 1,
            BATCHED_TOKENS, 50_272,
        )  # fmt: skip
        greetings = [Arrived(GATEWAY, GatewayHello(PROTOCOL)), Arrived(WORKER, hello)]
        self._scheduler.handle(greetings, 0.0)
        (self.planner,) = self._scheduler.placement.planners

    @property
    def running(self) -> int:
        """Requests that are in the batch."""
        return len({stream.request.id for stream in self.planner.running})

    @property
    def waiting(self) -> int:
        """Sequences that are not, preempted ones included."""
        return len(self._scheduler.placement.waiting) + len(self._arrived)

    def arrive(self, job: Job) -> None:
        """Take a request in."""
        self._arrived.append(job)

    def begin(self, now: float) -> Sequence[Share]:
        """Begin the next step; empty if there is nothing to do."""
        if self._plan is None:
            self._handle([], now)
        if self._plan is None:
            return []
        rows = unpack_ints(self._plan.rows)
        starts, counts = rows[1::ROW_FIELDS], rows[2::ROW_FIELDS]
        return [
            Share(range(start, start + count), start + count)
            for start, count in zip(starts, counts, strict=True)
        ]

    def end(self, now: float) -> Iterable[tuple[Job, int]]:
        """The step is over: who was given how many tokens."""
        assert self._plan is not None
        rows = self.planner.flights[0].rows
        noise = self._rng.randbytes(4 * sum(row.samples for row in rows))
        result = Result(self._plan.epoch, self._plan.step, noise, self._logprobs(rows))
        self._plan = None
        return [
            (self._jobs[item.request], len(item.tokens) // 4)
            for item in self._handle([result], now)
        ]

    def usage(self) -> Usage:
        """Of the slots, during the step; blocks that several sequences share count once."""
        size, held = self.planner.worker.block_size, self.planner.cache.pool.held
        filled: dict[int, int] = {}
        fillable: dict[int, int] = {}
        for stream in self.planner.running:
            length = self._jobs[stream.request.id].length
            for index in range(stream.ordered // size, len(stream.table)):
                block, start = stream.table[index], index * size
                filled[block] = max(stream.ordered - start, 0)
                fillable[block] = min(length - start, size)
        tokens = (held - len(filled)) * size + sum(filled.values())
        needed = (held - len(filled)) * size + sum(fillable.values())
        return Usage(tokens, needed - tokens, held * size - needed, ARENA - held * size)

    def _handle(self, results: list[Result], now: float) -> list[Output]:
        """Tell the scheduler all that has come, keep its plan, and give the tokens that it sends.

        A greeting and a beat keep gateway and worker from being taken for dead.
        """
        events = [Arrived(WORKER, result) for result in results]
        events.append(Arrived(WORKER, WorkerBeat(self.planner.epoch, 0, False)))
        events.append(Arrived(GATEWAY, GatewayHello(PROTOCOL)))
        events += [Arrived(GATEWAY, self._submit(job, now)) for job in self._arrived]
        self._arrived.clear()
        news: list[Output] = []
        for send in self._scheduler.handle(events, now):
            match send.message:
                case Plan() as plan:
                    self._plan = plan
                case Outputs() as outputs:
                    news += outputs.items
                case Rejected() as rejected:
                    raise ValueError(f"A job was refused: {rejected.text}")
        return news

    def _submit(self, job: Job, now: float) -> Submit:
        request = str(job.number)
        self._jobs[request] = job
        prompt = self._rng.randbytes(4 * job.prompt)
        params = self._params(job)
        return Submit(request, 1, prompt, params, self._choices, age=now - job.arrives)

    def _logprobs(self, rows: Sequence[PlannedRow]) -> list[tuple[int, Logprobs]]:
        """Of beams, whose rows give one sample each."""
        beams = [row.sequence for row in rows if row.samples and row.sequence.request.search]
        return [(number, self._candidates(beam)) for number, beam in enumerate(beams)]
