"""How often prompts find their beginning cached, when several workers share the requests.

A trace of Mooncake's (Qin et al., "Mooncake", FAST 2025; one JSON object a line: `timestamp` in ms,
`input_length`, `output_length`, `hash_ids` of 512-token blocks) goes through the scheduler that
serves, with simulated workers under a virtual clock: a step takes as long as its tokens cost. What
counts is the share of prompt tokens that were found in a cache, and how unequally the others were
spread: the most that one worker computed, by the mean.
"""

import argparse
import gzip
from array import array
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from pathlib import Path

import msgspec

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    ROW_FIELDS,
    ChoiceState,
    GatewayBeat,
    GatewayHello,
    Join,
    OpenRequest,
    Outputs,
    Plan,
    Rejected,
    Result,
    Submit,
    WorkerBeat,
    WorkerHello,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.core import Arrived, Scheduler
from pagefleet_scheduler.outbox import Send
from pagefleet_scheduler.queue import Room

BLOCK = 512
BEAT = 0.5
GATEWAY = b"gateway"


class Line(msgspec.Struct):
    """One request of a trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]

    def submit(self, number: int) -> Submit:
        """The request; a block's tokens are its hash, over and over."""
        tokens = array("i")
        for block in self.hash_ids:
            tokens.extend([block] * BLOCK)
        prompt = tokens[: self.input_length].tobytes()
        params = SamplingParams(max_tokens=max(self.output_length, 1), seed=1)
        return Submit(f"r{number}", 1, prompt, params, [ChoiceState(0)])


@dataclass(frozen=True)
class Machine:
    """What a worker can hold, and how fast it is."""

    blocks: int
    slots: int = 256
    budget: int = 8192
    prefill: float = 20_000.0
    """Tokens a second."""
    step: float = 0.015
    """Seconds of a step besides."""

    def hello(self) -> WorkerHello:
        """How it joins."""
        return WorkerHello(
            protocol=PROTOCOL,
            host="host",
            pid=1,
            started=1,
            fingerprint="model",
            numerics="class",
            block_size=BLOCK,
            blocks=self.blocks,
            slots=self.slots,
            max_model_len=self.blocks * BLOCK,
            max_batched_tokens=self.budget,
            vocab_size=1 << 30,
        )


class Replay:
    """The scheduler, its workers, a gateway and the clock."""

    def __init__(self, workers: int, machine: Machine) -> None:
        self.scheduler = Scheduler(1 << 20, worker_wait=1e9, room=Room(10**6, 1 << 30))
        self._machine = machine
        self._workers = [b"worker %d" % number for number in range(workers)]
        self._epochs: dict[bytes, int] = {}
        self._busy_until = dict.fromkeys(self._workers, 0.0)
        self._open: dict[str, int] = {}
        """Requests that have not ended, and how many tokens of each have come."""
        self._events: list[tuple[float, int, Arrived | None]] = []
        """When, a number, and what arrives; None: it is time for beats."""
        self._numbers = count()

    def run(self, lines: list[Line]) -> None:
        """Serve a whole trace."""
        self._at(0.0, Arrived(GATEWAY, GatewayHello(PROTOCOL)))
        for worker in self._workers:
            self._at(0.0, Arrived(worker, self._machine.hello()))
        for number, line in enumerate(lines):
            self._at(line.timestamp / 1000, Arrived(GATEWAY, line.submit(number)))
        self._at(0.0, None)
        while self._events:
            now, _, event = heappop(self._events)
            if event is not None and isinstance(event.message, Submit):
                self._open[event.message.request] = 0
            arrived = self._beats(now) if event is None else [event]
            for send in self.scheduler.handle(arrived, now):
                self._receive(send, now)
            if event is None and (self._events or self._open):
                self._at(now + BEAT, None)

    def outcome(self) -> "Outcome":
        """What the caches were good for."""
        planners = self.scheduler.placement.planners
        queries = sum(planner.prefix_queries for planner in planners)
        hits = sum(planner.prefix_hits for planner in planners)
        computed = [planner.prefix_queries - planner.prefix_hits for planner in planners]
        imbalance = max(computed) / (sum(computed) / len(computed))
        return Outcome(hits / queries, imbalance, sum(each.preemptions for each in planners))

    def _at(self, time: float, event: Arrived | None) -> None:
        heappush(self._events, (time, next(self._numbers), event))

    def _receive(self, send: Send, now: float) -> None:
        match send.message:
            case Join(epoch):
                self._epochs[send.peer] = epoch
            case Plan() as plan:
                self._compute(send.peer, plan, now)
            case Outputs() as news:
                for output in news.items:
                    self._open[output.request] = output.position + len(output.tokens) // 4
                    if output.finish is not None:
                        del self._open[output.request]
            case Rejected(request, _, _, text):
                raise SystemExit(f"{request} was refused: {text}")

    def _compute(self, worker: bytes, plan: Plan, now: float) -> None:
        rows = unpack_ints(plan.rows)
        fed, samples = sum(rows[2::ROW_FIELDS]), sum(rows[3::ROW_FIELDS])
        begin = max(now, self._busy_until[worker])
        end = begin + self._machine.step + fed / self._machine.prefill
        self._busy_until[worker] = end
        result = Result(plan.epoch, plan.step, pack_ints([1] * samples))
        self._at(end, Arrived(worker, result))

    def _beats(self, now: float) -> list[Arrived]:
        lines = [OpenRequest(request, 1, {0: had}) for request, had in self._open.items()]
        beats = [
            Arrived(worker, WorkerBeat(epoch, int(now / BEAT), self._busy_until[worker] > now))
            for worker, epoch in self._epochs.items()
        ]
        return [Arrived(GATEWAY, GatewayBeat(lines)), *beats]


@dataclass(frozen=True)
class Outcome:
    """What a replay comes to."""

    hit_rate: float
    """Of prompt tokens."""
    imbalance: float
    """The most tokens that one worker computed, by the mean."""
    preemptions: int


def read(path: Path, most: int) -> list[Line]:
    """The first lines of a trace."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        return [msgspec.json.decode(line, type=Line) for line in islice(file, most)]


def main() -> None:
    """Print the outcome of a trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="of each worker's pool")
    parser.add_argument("--prefill", type=float, default=20_000.0, help="tokens a second")
    parser.add_argument("--requests", type=int, default=10**9, help="no more than so many")
    options = parser.parse_args()
    machine = Machine(options.tokens // BLOCK, prefill=options.prefill)
    replay = Replay(options.workers, machine)
    replay.run(read(options.trace, options.requests))
    outcome = replay.outcome()
    print(
        f"{100 * outcome.hit_rate:.1f} % of prompt tokens found, imbalance "
        f"{outcome.imbalance:.3f}, {outcome.preemptions} preemptions"
    )


if __name__ == "__main__":
    main()
