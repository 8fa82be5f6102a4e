"""A cell in one process: the real scheduler core, real engines, and a gateway that keeps all.

Time stands still unless a test moves it; nothing happens unless a test makes it happen.
"""

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    Abort,
    ChoiceState,
    Finish,
    Floats,
    GatewayHello,
    Join,
    Logprobs,
    Output,
    Outputs,
    Plan,
    Rejected,
    Submit,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.core import Arrived, Lost, Scheduler
from pagefleet_scheduler.planner import Planner
from pagefleet_worker.interface import Engine

GATEWAY = b"gateway"


@dataclass
class Client:
    """One request, and what has come of it."""

    submit: Submit
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[Logprobs]]
    scores: dict[int, float] = field(default_factory=dict)
    finished: dict[int, Finish] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    embedding: Floats | None = None
    rejected: Rejected | None = None

    @property
    def open(self) -> bool:
        """Whether something is still to come."""
        return self.rejected is None and self.tokens.keys() != self.finished.keys() | self.aborted


@dataclass
class Worker:
    """An engine, and the plans that wait for it."""

    engine: Engine
    plans: deque[Plan] = field(default_factory=deque)


class Cell:
    """See the module's text; unless told not to, the scheduler checks itself after everything that
    happens.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], *, check: bool = True, **options: int
    ) -> None:
        self.scheduler = Scheduler(1 << 30, check=check, **options)
        self.make_engine = make_engine
        self.workers: dict[bytes, Worker] = {}
        self.clients: dict[str, Client] = {}
        self.now = 0.0
        self.steps = 0

    @property
    def planner(self) -> Planner:
        """That of the only worker."""
        (planner,) = self.scheduler.placement.planners
        return planner

    # --- what happens ---------------------------------------------------------------------------

    def join(self) -> bytes:
        """A worker joins."""
        name = f"worker {len(self.workers)} {random.random()}".encode()
        self.workers[name] = Worker(self.make_engine())
        hello = self.workers[name].engine.facts.hello("host", pid=1, started=1)
        self._handle(Arrived(name, hello))
        return name

    def kill(self, name: bytes) -> None:
        """A worker dies."""
        del self.workers[name]
        self._handle(Lost(name))

    def submit(
        self, prompt: list[int], params: SamplingParams, choices: int = 1, salt: bytes = b""
    ) -> str:
        """A request comes; returns its id."""
        request = f"r{len(self.clients)}"
        submit = Submit(
            request, 1, pack_ints(prompt), params, [ChoiceState(n) for n in range(choices)],
            salt=salt,
        )  # fmt: skip
        self.clients[request] = Client(
            submit, {n: [] for n in range(choices)}, {n: [] for n in range(choices)}
        )
        self._handle(Arrived(GATEWAY, submit))
        return request

    def press(self) -> None:
        """Three requests come, each of which grows to half of all blocks: before one of them ends,
        an older one has to take blocks from the latest, whatever else is computed.
        """
        worker = self.planner.worker
        prompt = 2 * worker.block_size
        most = worker.blocks // 2 * worker.block_size
        for number in range(3):
            params = SamplingParams(max_tokens=most - prompt, seed=number)
            self.submit([number] * prompt, params)

    def abort(self, request: str, choices: list[int] | None = None) -> None:
        """A client leaves, or is content with what it has of some choices."""
        client = self.clients[request]
        client.aborted |= set(choices or client.tokens)
        self._handle(Arrived(GATEWAY, Abort(request, 1, choices or [])))

    def step(self, name: bytes) -> bool:
        """A worker computes its next plan, if it has one."""
        worker = self.workers[name]
        if not worker.plans:
            return False
        self.steps += 1
        result = worker.engine.launch(worker.plans.popleft()).result()
        self._handle(Arrived(name, result))
        return True

    def run(self, limit: int = 20_000) -> None:
        """Compute until nothing is left to compute."""
        for _ in range(limit):
            if not [name for name in list(self.workers) if self.step(name)]:
                return
        raise AssertionError(f"no end after {limit} rounds: {self.scheduler!r}")

    def assert_idle(self) -> None:
        """Everybody got an answer, and every block is free."""
        open_ones = [name for name, client in self.clients.items() if client.open]
        assert not open_ones, repr(self.scheduler)
        assert not self.scheduler.requests
        for planner in self.scheduler.placement.planners:
            assert planner.cache.pool.held == 0
            assert not planner.flights

    def _handle(self, *events: Arrived | Lost) -> None:
        beat = Arrived(GATEWAY, GatewayHello(PROTOCOL))
        for send in self.scheduler.handle([*events, beat], self.now):
            match send.message:
                case Join():
                    self.workers[send.peer].engine.reset()
                    self.workers[send.peer].plans.clear()
                case Plan():
                    self.workers[send.peer].plans.append(send.message)
                case Outputs():
                    for item in send.message.items:
                        self._take(self.clients[item.request], item.choice, item)
                case Rejected():
                    self.clients[send.message.request].rejected = send.message

    def _take(self, client: Client, choice: int, item: Output) -> None:
        if choice in client.aborted:
            return
        assert choice not in client.finished
        assert item.position == len(client.tokens[choice])
        client.tokens[choice] += array("i", unpack_ints(item.tokens)).tolist()
        if item.logprobs is not None:
            client.logprobs[choice].append(item.logprobs)
        if item.score is not None:
            client.scores[choice] = item.score
        if item.finish is not None:
            client.finished[choice] = item.finish
            client.embedding = item.embedding
