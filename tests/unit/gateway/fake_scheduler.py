"""A small real scheduler: speaks the wire over ZeroMQ and answers with tokens that are known.

The tokens of a choice are the prompt's, from the end to its beginning, over and over, shifted by
the choice's number: what a client must see is a plain function of what it sent. It has its own
thread, one token a step as long as the gateway takes more, and as many open requests as come.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import zmq

from pagefleet.transport import Hub
from pagefleet.wire import (
    CACHED_BLOCK,
    PROTOCOL,
    STEP_BOUNDS,
    Abort,
    CellStats,
    Credit,
    EngineStats,
    Finish,
    GatewayBeat,
    GatewayHello,
    Inspect,
    Logprobs,
    Message,
    Output,
    Outputs,
    PromptOutput,
    Pulse,
    Reason,
    Refused,
    Rejected,
    Snapshot,
    Submit,
    Wait,
    WaitingSequence,
    Welcome,
    WorkerMemory,
    decode_from_gateway,
    encode,
    pack_floats,
    pack_ints,
    unpack_ints,
)

QUEUED = 1
"""Microseconds that every request is said to have waited."""


def expected_token(prompt: list[int], choice: int, position: int) -> int:
    """The token of a choice at an output position."""
    return prompt[-1 - (position + choice) % len(prompt)]


def expected_logprob(token: int) -> float:
    """Exact in float32."""
    return -(token % 64) / 64


def expected_embedding(prompt: list[int], dimensions: int = 0) -> list[float]:
    """The first numbers of a prompt's embedding, exact in float32; it has four."""
    return [len(prompt) / 8, sum(prompt) / 256, -prompt[0] / 256, prompt[-1] / 256][
        : dimensions or None
    ]


@dataclass
class Running:
    """A request and how far each choice that goes on has come."""

    submit: Submit
    gateway: bytes
    prompt: list[int]
    positions: dict[int, int]
    limits: dict[int, int]
    """Tokens that the gateway takes of each choice for now, where it says so."""

    def step(self) -> list[Output]:
        """One token of each choice that may have one."""
        outputs = []
        for choice, position in list(self.positions.items()):
            if position >= self.limits.get(choice, position + 1):
                continue
            outputs.append(self._next(choice, position))
            if outputs[-1].finish:
                del self.positions[choice]
            else:
                self.positions[choice] += 1
        return outputs

    def _next(self, choice: int, position: int) -> Output:
        params = self.submit.params
        token = expected_token(self.prompt, choice, position)
        finish = None
        if token in params.eos_token_ids or token in params.stop_token_ids:
            finish = Finish.STOP
        elif position + 1 >= params.max_tokens:
            finish = Finish.LENGTH
        return Output(
            self.submit.request,
            self.submit.attempt,
            choice,
            position,
            pack_ints([token] if params.max_tokens else []),
            None if params.logprobs is None else logprobs_of([token], params.logprobs),
            finish,
            cached=len(self.prompt) // 2,
            queued=0 if position else QUEUED,
            embedding=None
            if params.embedding is None
            else pack_floats(expected_embedding(self.prompt, params.embedding)),
        )


def logprobs_of(tokens: list[int], width: int) -> Logprobs:
    """Each token is the most likely; those after it follow."""
    top = [[token + k for k in range(width)] for token in tokens]
    return Logprobs(
        pack_floats(expected_logprob(token) for token in tokens),
        pack_ints(token for row in top for token in row),
        pack_floats(expected_logprob(row[0]) - k for row in top for k in range(len(row))),
    )


@dataclass
class FakeScheduler:
    """Answers gateways until it is stopped; what it saw can be looked at from other threads."""

    endpoint: str
    step_seconds: float = 0.0
    reject: Reason | None = None
    refusal: str | None = None
    """Why no gateway is let in."""
    workers: int = 1
    longest: int = 4096
    """Tokens of a sequence that they can hold."""
    submits: list[Submit] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)
    epoch: int = 1
    _stopping: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def started(self) -> Iterator["FakeScheduler"]:
        """Serve from a thread for as long as the context lasts."""
        self._stopping.clear()
        thread = threading.Thread(target=self._serve)
        thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            thread.join()

    def _serve(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context, closing(Hub(self.endpoint, context)) as hub:
            stepped = time.monotonic()
            while not self._stopping.is_set():
                hub.socket.poll(1 if self.running else 5)
                for gateway, frame in hub.receive():
                    for message in self._handle(gateway, frame):
                        hub.send(gateway, encode(message))
                if time.monotonic() - stepped >= self.step_seconds:
                    stepped = time.monotonic()
                    self._step(hub)

    def _handle(self, gateway: bytes, frame: bytes) -> list[Message]:
        match decode_from_gateway(frame):
            case GatewayHello() | GatewayBeat() if self.refusal is not None:
                return [Refused(self.refusal)]
            case GatewayHello():
                return [Welcome(self.epoch, PROTOCOL, self._known_length)]
            case GatewayBeat(open=open):
                unknown = [line.request for line in open if line.request not in self.running]
                return [self._pulse(unknown)]
            case Inspect() as inspect:
                return [self._snapshot(inspect)]
            case Submit() as submit:
                return self._submit(gateway, submit)
            case Abort() as abort:
                self.aborts.append(abort)
                self._abort(abort)
            case Credit(request, limits=limits) if request in self.running:
                self.running[request].limits |= limits
        return []

    def _pulse(self, unknown: list[str]) -> Pulse:
        running = len(self.running)
        stats = EngineStats(
            3, running, 10, 4, 5, 100, 60, 2, drafted=50, drafts_kept=40, block_size=16
        )
        engines = [stats] * self.workers
        steps = CellStats([1] * (len(STEP_BOUNDS) + 1), 500, 1, 2, 3, 4, 5, 6_500_000)
        return Pulse(
            *(self.epoch, self.workers, running, 0, self._known_length, unknown, False, engines),
            cell=steps,
        )

    @property
    def _known_length(self) -> int:
        return self.longest if self.workers else 0

    def _snapshot(self, inspect: Inspect) -> Snapshot:
        blocks = bytes([0, 0, CACHED_BLOCK, 1, 1, 12]) if inspect.blocks else b""
        pool = WorkerMemory(3, 2, 8, 16, 6, 2, 1, {1: 2, 12: 1}, 5, 0, 0, 1, 2, 3, 4, blocks)
        waiting = WaitingSequence("r", [0, 1], 1.5, 20, 1, Wait.BLOCKS, 6, 5)
        return Snapshot(self.epoch, inspect.query, [pool], [waiting])

    def _submit(self, gateway: bytes, submit: Submit) -> list[Message]:
        self.submits.append(submit)
        if self.reject is not None:
            return [Rejected(submit.request, submit.attempt, self.reject, "Not today.")]
        prompt = unpack_ints(submit.prompt).tolist()
        positions = {
            state.index: len(state.tokens) // 4 for state in submit.choices if not state.finished
        }
        limits = {each: position + submit.window for each, position in positions.items()}
        self.running[submit.request] = Running(
            submit, gateway, prompt, positions, limits if submit.window else {}
        )
        wanted = submit.params.prompt_logprobs
        if wanted is None or len(prompt) == 1:
            return []
        half = 1 + (len(prompt) - 1) // 2
        return [
            Outputs(
                self.epoch,
                [],
                [
                    PromptOutput(submit.request, submit.attempt, start, logprobs_of(part, wanted))
                    for start, part in ((1, prompt[1:half]), (half, prompt[half:]))
                ],
            )
        ]

    def _abort(self, abort: Abort) -> None:
        running = self.running.get(abort.request)
        if running is None:
            return
        for choice in abort.choices or list(running.positions):
            running.positions.pop(choice, None)
        if not running.positions:
            del self.running[abort.request]

    def _step(self, hub: Hub) -> None:
        for request, running in list(self.running.items()):
            items = running.step()
            if items:
                hub.send(running.gateway, encode(Outputs(self.epoch, items)))
            if not running.positions:
                del self.running[request]
