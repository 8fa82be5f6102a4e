"""The scheduler: events in, messages out. No socket, clock, thread, tensor or text.

    handle([Arrived(peer, message), Lost(peer), ...], now) -> [Send(peer, message), ...]

All that has arrived is handled together and planned for once; an empty list of events is the tick
of a clock (every 50 ms). The same object runs in production, in unit tests and in simulations.

Life of a request: a gateway submits it; its sequences wait, oldest first, until a worker has a slot
and blocks for them; they run there step by step; each result moves them on, and what is new goes to
the gateway; a choice ends by a stop token, its length, an abort. What a sequence has is only its
tokens: when its worker is lost, or it is preempted, it waits at its old place and is computed
again, wherever. When the gateway misses something it says so in its beat and is sent it again;
when this scheduler is new, the gateways submit everything again with what they have.

Invariants (`check`): every unfinished sequence of every request either waits or runs at exactly one
worker; the planners' and pools' own.
"""

from array import array
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from pagefleet.wire import (
    PROTOCOL,
    Abort,
    EngineStats,
    Fence,
    Finish,
    GatewayBeat,
    GatewayBye,
    GatewayHello,
    Join,
    Logprobs,
    Message,
    Output,
    Outputs,
    PromptOutput,
    Pulse,
    Reason,
    Refused,
    Rejected,
    Result,
    Submit,
    ToScheduler,
    Welcome,
    WorkerBeat,
    WorkerBye,
    WorkerHello,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler import decoding, router
from pagefleet_scheduler.planner import Flight, Planner, ResultError
from pagefleet_scheduler.sequence import Request, Sequence

WORKER_SILENCE = 2.0
"""Seconds without a word after which a worker is lost."""

WORKER_HANG = 2.0
"""Seconds that a busy worker may take for one layer, at least."""

GATEWAY_LEASE = 2.0
"""Seconds without a word after which a gateway's requests are dropped."""

REPEAT_AFTER = 1.0
"""Seconds after which a plan that an idle worker has not answered is sent once more."""

STALL = 2.0
"""Seconds of waiting requests and no result after which the cell counts as stalled."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message came from a peer."""

    peer: bytes
    message: ToScheduler


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer is gone for sure: its process has ended, or its queue takes nothing any more."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Send:
    """A message for a peer."""

    peer: bytes
    message: Message


@dataclass(slots=True)
class _Gateway:
    heard: float
    requests: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Worker:
    number: int
    planner: Planner
    heard: float
    progress: int = 0
    progressed: float = 0.0
    slowest: float = 0.0
    """Seconds between two advances of its progress, at most, while busy."""
    busy: bool = False


class Scheduler:
    """Everything that is known of the cell, and what to do about it."""

    def __init__(
        self,
        epoch: int,
        *,
        lookahead: bool = True,
        caching: bool = True,
        check: bool = False,
        max_queued: int = 10_000,
        worker_wait: float = 30.0,
    ) -> None:
        self.epoch = epoch
        self.lookahead = lookahead
        self.caching = caching
        self.checking = check
        self.max_queued = max_queued
        self.worker_wait = worker_wait
        self.requests: dict[str, Request] = {}
        self.waiting: list[Sequence] = []
        self.dropped_results = 0
        self._gateways: dict[bytes, _Gateway] = {}
        self._workers: dict[bytes, _Worker] = {}
        self._joined = 0
        self._arrivals = 0
        self._progressed = 0.0
        self._had_worker: float | None = None
        self._sends: list[Send] = []
        self._outputs: dict[bytes, list[Output]] = {}
        self._prompts: dict[bytes, list[PromptOutput]] = {}
        self._now = 0.0

    def __repr__(self) -> str:
        running = sum(len(worker.planner.running) for worker in self._workers.values())
        return (
            f"<Scheduler {len(self.requests)} requests, {running} sequences run, "
            f"{len(self.waiting)} wait, {len(self._workers)} workers>"
        )

    def handle(self, events: Iterable[Arrived | Lost], now: float) -> list[Send]:
        """Take what happened and say what to send.

        Args:
            events: in the order in which they came.
            now: seconds on a clock that never goes back.
        """
        self._now = now
        for event in events:
            if isinstance(event, Lost):
                self._peer_lost(event.peer)
            else:
                self._arrived(event.peer, event.message)
        self._watch()
        self._schedule()
        self._flush_outputs()
        if self.checking:
            self.check()
        sends, self._sends = self._sends, []
        return sends

    # --- what arrives ---------------------------------------------------------------------------

    def _arrived(self, peer: bytes, message: ToScheduler) -> None:
        if worker := self._workers.get(peer):
            worker.heard = self._now
        if gateway := self._gateways.get(peer):
            gateway.heard = self._now
        match message:
            case Result():
                self._result(peer, message)
            case Submit():
                self._submit(peer, message)
            case Abort():
                self._abort(message)
            case GatewayBeat():
                self._gateway_beat(peer, message)
            case WorkerBeat():
                self._worker_beat(peer, message)
            case GatewayHello():
                self._gateway_hello(peer, message)
            case WorkerHello():
                self._worker_hello(peer, message)
            case GatewayBye() | WorkerBye():
                self._peer_lost(peer)

    def _peer_lost(self, peer: bytes) -> None:
        if self._workers.get(peer):
            self._drop_worker(peer)
        if gateway := self._gateways.pop(peer, None):
            for request in sorted(gateway.requests):
                self._forget(self.requests[request])

    # --- gateways -------------------------------------------------------------------------------

    def _gateway_hello(self, peer: bytes, hello: GatewayHello) -> None:
        if hello.protocol != PROTOCOL:
            self._send(peer, Refused(_protocol_text(hello.protocol)))
            return
        self._gateway(peer)
        self._send(peer, Welcome(self.epoch, PROTOCOL))

    def _gateway(self, peer: bytes) -> _Gateway:
        return self._gateways.setdefault(peer, _Gateway(self._now))

    def _gateway_beat(self, peer: bytes, beat: GatewayBeat) -> None:
        self._gateway(peer)
        unknown = []
        for line in beat.open:
            request = self.requests.get(line.request)
            if request is None or request.attempt != line.attempt:
                unknown.append(line.request)
                continue
            for choice, position in line.positions.items():
                if sequence := request.sequences.get(choice) or request.finished.get(choice):
                    self._repeat_outputs(sequence, choice, position)
        self._send(peer, self._pulse(unknown))

    def _repeat_outputs(self, sequence: Sequence, choice: int, position: int) -> None:
        """Send again what had been sent before the gateway's last beat, and is not there yet."""
        missing = position < sequence.sent_before or sequence.finish is not None
        if sequence.base <= position <= sequence.sent_before and missing:
            self._output(sequence, choice, position)
        sequence.sent_before = sequence.sent

    def _pulse(self, unknown: list[str]) -> Pulse:
        planners = [worker.planner for worker in self._workers.values()]
        return Pulse(
            epoch=self.epoch,
            workers=len(planners),
            running=sum(len(planner.running) for planner in planners),
            waiting=len(self.waiting),
            max_model_len=max((_longest(planner) for planner in planners), default=0),
            unknown=unknown,
            stalled=self.stalled,
            engines=[
                EngineStats(
                    engine=worker.number,
                    running=len(worker.planner.running),
                    blocks=worker.planner.pool.blocks,
                    used_blocks=worker.planner.pool.held,
                    cached_blocks=worker.planner.pool.cached,
                    prefix_queries=worker.planner.prefix_queries,
                    prefix_hits=worker.planner.prefix_hits,
                    preemptions=worker.planner.preemptions,
                )
                for worker in self._workers.values()
            ],
        )

    @property
    def stalled(self) -> bool:
        """Whether requests wait and nothing has come back for a while."""
        return bool(self.requests) and self._now - self._progressed > STALL

    def _submit(self, peer: bytes, submit: Submit) -> None:
        known = self.requests.get(submit.request)
        if known is not None:
            if known.attempt >= submit.attempt:
                return
            self._forget(known)
        prompt = unpack_ints(submit.prompt)
        if not prompt or not submit.choices:
            self._reject(peer, submit, Reason.INVALID, "The prompt has no tokens.", "prompt")
            return
        if len(self.waiting) >= self.max_queued:
            self._reject(peer, submit, Reason.OVERLOADED, "Too many requests wait already.")
            return
        if not self.requests:
            self._progressed = self._now
        self._arrivals += 1
        arrived = self._now - submit.age
        request = Request(
            id=submit.request,
            attempt=submit.attempt,
            gateway=peer,
            prompt=prompt,
            params=submit.params,
            salt=submit.salt,
            order=(submit.priority, arrived, self._arrivals),
            arrived=arrived,
        )
        self.requests[request.id] = request
        self._gateway(peer).requests.add(request.id)
        self._begin_sequences(request, submit)
        self._refuse_what_never_fits(request)

    def _begin_sequences(self, request: Request, submit: Submit) -> None:
        """Choices that have tokens go on, each by itself; all others begin together."""
        fresh = []
        for choice in submit.choices:
            outputs = unpack_ints(choice.tokens)
            if choice.finished:
                continue
            if not outputs:
                fresh.append(choice.index)
                continue
            sequence = Sequence(request, [choice.index], request.prompt + outputs)
            sequence.base = sequence.sent = sequence.sent_before = len(outputs)
            request.sequences[choice.index] = sequence
            sequence.finish = decoding.finish_of(request.params, len(outputs), outputs[-1])
            if sequence.finish is None:
                self._wait(sequence)
            else:
                self._output(sequence, choice.index, len(outputs))
                request.end(choice.index)
        if fresh:
            sequence = Sequence(request, fresh, request.prompt[:])
            request.sequences |= dict.fromkeys(fresh, sequence)
            self._wait(sequence)
        self._end_if_finished(request)

    def _refuse_what_never_fits(self, request: Request) -> None:
        planners = [worker.planner for worker in self._workers.values()]
        for sequence in request.sequences.values():
            if planners and not any(planner.fits(sequence) for planner in planners):
                longest = max(_longest(planner) for planner in planners)
                text = (
                    f"The prompt of {len(request.prompt)} tokens and {request.params.max_tokens} "
                    f"tokens to generate are more than the {longest} that a worker can hold."
                )
                self._send(
                    request.gateway,
                    Rejected(request.id, request.attempt, Reason.TOO_LONG, text, "max_tokens"),
                )
                self._forget(request)
                return

    def _reject(
        self, peer: bytes, submit: Submit, reason: Reason, text: str, param: str | None = None
    ) -> None:
        self._send(peer, Rejected(submit.request, submit.attempt, reason, text, param))

    def _abort(self, abort: Abort) -> None:
        request = self.requests.get(abort.request)
        if request is None or request.attempt != abort.attempt:
            return
        for choice in abort.choices or list(request.sequences):
            self._abort_choice(request, choice)
        self._end_if_finished(request)

    def _abort_choice(self, request: Request, choice: int) -> None:
        sequence = request.sequences.pop(choice, None)
        if sequence is not None and not any(map(sequence.answers, sequence.choices)):
            sequence.finish = Finish.ABORT
            self._stop(sequence)

    # --- workers --------------------------------------------------------------------------------

    def _worker_hello(self, peer: bytes, hello: WorkerHello) -> None:
        if hello.protocol != PROTOCOL:
            self._send(peer, Refused(_protocol_text(hello.protocol)))
            return
        for other in self._workers.values():
            if other.planner.worker.fingerprint != hello.fingerprint:
                self._send(peer, Refused("You serve another model than the workers of this cell."))
                return
        if peer in self._workers:
            self._drop_worker(peer)
        self._joined += 1
        planner = Planner(
            hello,
            self.epoch + self._joined,
            lookahead=self.lookahead,
            caching=self.caching,
            check=self.checking,
        )
        worker = _Worker(self._joined - 1, planner, heard=self._now, progressed=self._now)
        self._workers[peer] = worker
        self._send(peer, Join(planner.epoch))

    def _worker_beat(self, peer: bytes, beat: WorkerBeat) -> None:
        worker = self._workers.get(peer)
        if worker is None or worker.planner.epoch != beat.epoch:
            self._send(peer, Fence("You are not, or no longer, of this cell."))
            return
        if beat.progress != worker.progress or not beat.busy:
            if worker.busy:
                worker.slowest = max(worker.slowest, self._now - worker.progressed)
            worker.progress, worker.progressed = beat.progress, self._now
        worker.busy = beat.busy
        if not beat.busy and worker.planner.flights:
            self._repeat_plans(peer, worker.planner.flights)

    def _repeat_plans(self, peer: bytes, flights: Iterable[Flight]) -> None:
        for flight in flights:
            if self._now - flight.sent < REPEAT_AFTER:
                return
            if flight.repeated:
                self._fence(peer, f"Step {flight.plan.step} is not answered.")
                return
            flight.sent, flight.repeated = self._now, True
            self._send(peer, flight.plan)

    def _fence(self, peer: bytes, text: str) -> None:
        self._send(peer, Fence(text))
        self._drop_worker(peer)

    def _drop_worker(self, peer: bytes) -> None:
        """All that ran there starts again from its tokens, at its old place in the queue."""
        for sequence in self._workers.pop(peer).planner.abandon():
            self._wait(sequence)
        self._had_worker = self._now

    def _result(self, peer: bytes, result: Result) -> None:
        worker = self._workers.get(peer)
        if worker is None or worker.planner.epoch != result.epoch:
            self.dropped_results += 1
            return
        if worker.planner.flights and result.step < worker.planner.flights[0].plan.step:
            self.dropped_results += 1
            return
        try:
            accepted = worker.planner.accept(result)
        except ResultError as error:
            self._fence(peer, f"Your result is void: {error}.")
            return
        self._progressed = worker.progressed = self._now
        for sequence, text in accepted.failed:
            self._fail(sequence, text)
        for sequence, piece in accepted.prompts:
            self._prompt_output(sequence.request, piece.position, piece.logprobs)
        for sampled in accepted.sampled:
            self._sampled(sampled.sequence, sampled.tokens, sampled.logprobs, worker.planner)
        for sequence in accepted.completed:
            sequence.finish = Finish.LENGTH
            for choice in filter(sequence.answers, sequence.choices):
                self._output(sequence, choice, 0)
                sequence.request.end(choice)
            self._stop(sequence)
            self._end_if_finished(sequence.request)

    def _sampled(
        self,
        sequence: Sequence,
        tokens: "array[int]",
        logprobs: list[Logprobs | None],
        planner: Planner,
    ) -> None:
        sequences = [sequence]
        if len(tokens) > 1:
            sequences = self._fork(sequence, planner)
        for each, token, piece in zip(sequences, tokens, logprobs, strict=True):
            choice = each.choices[0]
            decoding.append(each, token, piece)
            if each.answers(choice):
                self._output(each, choice, each.sent)
            else:
                each.finish = Finish.ABORT
            if each.finish is not None:
                self._stop(each)
                sequence.request.end(choice)
        self._end_if_finished(sequence.request)

    def _fork(self, parent: Sequence, planner: Planner) -> list[Sequence]:
        """Each choice gets a sequence of its own, at the same worker if it still runs there."""
        sequences = decoding.fork(parent)
        if parent.slot is not None:
            waiting = planner.fork(sequences)
        else:
            waiting = sequences[1:]
            for other in waiting:
                other.forget_run()
        for other in waiting:
            self._wait(other)
        return sequences

    def _fail(self, sequence: Sequence, text: str) -> None:
        request = sequence.request
        if request.id in self.requests:
            self._send(request.gateway, Rejected(request.id, request.attempt, Reason.FAILED, text))
            self._forget(request)

    # --- sequences ------------------------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda waiting: waiting.order)

    def _stop(self, sequence: Sequence) -> None:
        """Take a sequence that has ended from wherever it is."""
        if sequence.slot is not None:
            self._planner_of(sequence).remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _planner_of(self, sequence: Sequence) -> Planner:
        return next(
            worker.planner
            for worker in self._workers.values()
            if sequence in worker.planner.running
        )

    def _forget(self, request: Request) -> None:
        """Drop a request with all of its sequences; nobody is told."""
        for choice in list(request.sequences):
            sequence = request.sequences.pop(choice)
            if sequence.finish is None:
                sequence.finish = Finish.ABORT
                self._stop(sequence)
        self._end_if_finished(request)

    def _end_if_finished(self, request: Request) -> None:
        if not request.sequences and self.requests.get(request.id) is request:
            del self.requests[request.id]
            if gateway := self._gateways.get(request.gateway):
                gateway.requests.discard(request.id)

    # --- time and steps -------------------------------------------------------------------------

    def _watch(self) -> None:
        """Give up on whoever has been silent or stuck for too long."""
        for peer, worker in list(self._workers.items()):
            if self._now - worker.heard > WORKER_SILENCE:
                self._fence(peer, "Nothing was heard of you.")
            elif worker.busy and self._now - worker.progressed > max(
                WORKER_HANG, 4 * worker.slowest
            ):
                self._fence(peer, "You make no progress.")
        for peer, gateway in list(self._gateways.items()):
            if self._now - gateway.heard > GATEWAY_LEASE:
                self._peer_lost(peer)
        if self.requests and not self._workers:
            self._refuse_after_waiting()

    def _refuse_after_waiting(self) -> None:
        since = self._had_worker or 0.0
        for request in list(self.requests.values()):
            if self._now - max(request.arrived, since) > self.worker_wait:
                text = f"No worker has joined for {self.worker_wait:.0f} seconds."
                self._send(
                    request.gateway,
                    Rejected(request.id, request.attempt, Reason.NO_WORKER, text),
                )
                self._forget(request)

    def _schedule(self) -> None:
        """Let waiting sequences in, and order a step wherever one can be."""
        planners = [worker.planner for worker in self._workers.values()]
        for planner in planners:
            planner.pool.settle()
        while self.waiting and self.waiting[0].ahead == 0:
            chosen = router.choose(self.waiting[0], planners)
            if chosen is None:
                break
            chosen.admit(self.waiting.pop(0))
        for peer, worker in self._workers.items():
            preempted: list[Sequence] = []
            while plan := worker.planner.plan(preempted):
                worker.planner.flights[-1].sent = self._now
                self._send(peer, plan)
            for sequence in preempted:
                self._wait(sequence)

    # --- what is sent ---------------------------------------------------------------------------

    def _send(self, peer: bytes, message: Message) -> None:
        self._sends.append(Send(peer, message))

    def _output(self, sequence: Sequence, choice: int, position: int) -> None:
        """Send what a choice has from `position` on."""
        request = sequence.request
        tokens = sequence.tokens[len(request.prompt) + position :]
        logprobs = sequence.logprobs[position - sequence.base :]
        self._outputs.setdefault(request.gateway, []).append(
            Output(
                request=request.id,
                attempt=request.attempt,
                choice=choice,
                position=position,
                tokens=pack_ints(tokens),
                logprobs=decoding.concatenate(logprobs),
                finish=sequence.finish,
                cached=sequence.cached,
            )
        )
        sequence.sent = sequence.outputs

    def _prompt_output(self, request: Request, position: int, logprobs: Logprobs) -> None:
        """Send logprobs of a piece of a prompt, unless they were sent before."""
        length = len(logprobs.chosen) // 4
        if self.requests.get(request.id) is request and (
            position <= request.prompt_logprobs_sent < position + length
        ):
            request.prompt_logprobs_sent = position + length
            self._prompts.setdefault(request.gateway, []).append(
                PromptOutput(request.id, request.attempt, position, logprobs)
            )

    def _flush_outputs(self) -> None:
        for peer in self._outputs.keys() | self._prompts.keys():
            outputs, prompts = self._outputs.pop(peer, []), self._prompts.pop(peer, [])
            self._send(peer, Outputs(self.epoch, outputs, prompts))

    def check(self) -> None:
        """Assert the invariants.

        Raises:
            AssertionError: one does not hold; that is a bug of ours.
        """
        running = [s for worker in self._workers.values() for s in worker.planner.running]
        for worker in self._workers.values():
            worker.planner.check()
        placed = {id(s) for s in [*running, *self.waiting]}
        assert len(placed) == len(running) + len(self.waiting)
        assert placed == {id(s) for r in self.requests.values() for s in r.sequences.values()}
        assert self.waiting == sorted(self.waiting, key=lambda sequence: sequence.order)
        assert all(s.slot is None and not s.table for s in self.waiting)
        for request in self.requests.values():
            assert request.sequences
            assert request.id in self._gateways[request.gateway].requests


def _longest(planner: Planner) -> int:
    return min(planner.worker.max_model_len, planner.pool.blocks * planner.pool.block_size)


def _protocol_text(protocol: int) -> str:
    return f"This scheduler speaks protocol {PROTOCOL}, not {protocol}; install the same version."
