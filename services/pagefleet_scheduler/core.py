"""The scheduler: events in, messages out. No socket, clock, thread, tensor or text.

    handle([Arrived(peer, message), Lost(peer), ...], now) -> [Send(peer, message), ...]

All that has arrived is handled together and planned for once; an empty list of events is the tick
of a clock (every 50 ms). The same object runs in production, in unit tests and in simulations.

This file knows the peers: who is there, under which epoch, and for how long nothing was heard of
them. A message that cannot be sent says nothing: the beats show what has not arrived, and whether
its receiver lives. `admission` takes requests in, `requests` knows what clients asked for,
`placement` where each sequence is, a `planner` per worker what to compute next, `outbox` what to
send.

What a sequence has is only its tokens. When its worker is lost it waits at its old place and is
computed again, wherever. When a gateway misses something it says so in its beat and is sent it
again; when this scheduler is new, the gateways submit everything again with what they have.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from pagefleet.wire import (
    PROTOCOL,
    Abort,
    Credit,
    Fence,
    GatewayBeat,
    GatewayBye,
    GatewayHello,
    Inspect,
    Join,
    Moved,
    Pulse,
    Reason,
    Refused,
    Result,
    Submit,
    TenantUse,
    ToScheduler,
    Welcome,
    WorkerBeat,
    WorkerBye,
    WorkerHello,
)
from pagefleet_scheduler import quarantine
from pagefleet_scheduler.admission import Admission
from pagefleet_scheduler.figures import Figures
from pagefleet_scheduler.flights import ResultError, keep
from pagefleet_scheduler.liveness import Worker
from pagefleet_scheduler.outbox import Outbox, Send
from pagefleet_scheduler.placement import Placement
from pagefleet_scheduler.planner import Planner
from pagefleet_scheduler.quarantine import CERTAIN, DOUBTFUL
from pagefleet_scheduler.queue import DEFAULT_ROOM, Room
from pagefleet_scheduler.requests import Requests
from pagefleet_scheduler.sequence import Request, Sequence
from pagefleet_scheduler.snapshot import take_snapshot
from pagefleet_scheduler.usage import Usage

GATEWAY_LEASE = 2.0
"""Seconds without a word after which a gateway's requests are dropped."""

REVIEW = 1.0
"""Seconds between two looks at requests that nobody may be able to take."""

ABSENCE = 0.5
"""Seconds between two calls, of which there is one every 50 ms, that show that it was stopped."""

STALL = 2.0
"""Seconds of open requests and no progress anywhere after which the cell counts as stalled."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message came from a peer."""

    peer: bytes
    message: ToScheduler


@dataclass(frozen=True, slots=True)
class Lost:
    """A peer is gone: the kernel says that its process has ended."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A peer could not be sent to: it has no connection for now, or takes nothing any more."""

    peer: bytes


Event: TypeAlias = Arrived | Lost | Unreachable


class Scheduler:
    """Everything that is known of the cell, and what to do about it."""

    def __init__(
        self,
        epoch: int,
        *,
        lookahead: bool = True,
        caching: bool = True,
        check: bool = False,
        room: Room = DEFAULT_ROOM,
        worker_wait: float = 30.0,
        drafts: int = 0,
        prioritized: bool = True,
    ) -> None:
        self.epoch = epoch
        self.lookahead = lookahead
        self.caching = caching
        self.checking = check
        self.worker_wait = worker_wait
        self.drafts = drafts
        self.placement = Placement()
        self.outbox = Outbox(epoch)
        self.requests = Requests(self.placement, self.outbox)
        self.admission = Admission(
            self.requests, self.placement, self.outbox, room, prioritized=prioritized
        )
        self.usage = Usage()
        self.figures = Figures()
        self._gateways: dict[bytes, float] = {}
        """When each was last heard of."""
        self._workers: dict[bytes, Worker] = {}
        self._joined = 0
        self._progressed = 0.0
        self._had_worker = 0.0
        self._review_due = 0.0
        self._inspections: list[tuple[bytes, Inspect]] = []
        self._now = 0.0

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self.requests)} requests, {len(self._gateways)} gateways, "
            f"{len(self._workers)} workers, {self.placement!r}>"
        )

    def handle(self, events: Iterable[Event], now: float) -> list[Send]:
        """Take what happened and say what to send.

        Args:
            events: in the order in which they came.
            now: seconds on a clock that never goes back.
        """
        if (absence := now - self._now) > ABSENCE:
            self._excuse(absence)
        self._now = now
        for event in events:
            match event:
                case Lost():
                    self._lose(event.peer)
                case Unreachable():
                    if worker := self._workers.get(event.peer):
                        worker.unreached = True
                case Arrived():
                    self._arrived(event.peer, event.message)
        self._watch()
        self.admission.watch(now)
        self.placement.admit(now)
        self._order_steps()
        self._answer_inspections()
        if self.checking:
            self.check()
        return self.outbox.flush()

    def check(self) -> None:
        """Assert the invariants.

        Raises:
            AssertionError: one does not hold; that is a bug of ours.
        """
        self.placement.check(self.requests)
        self.admission.check()
        for request in self.requests:
            assert request.sequences
            assert request.gateway in self._gateways

    def _arrived(self, peer: bytes, message: ToScheduler) -> None:
        worker = self._workers.get(peer)
        if peer in self._gateways:
            self._gateways[peer] = self._now
        match message:
            case Result():
                self._result(peer, message)
            case Submit():
                self._submit(peer, message)
            case Abort():
                self._abort(message)
            case Credit():
                if request := self._current(message):
                    self.requests.allow(request, message.limits)
            case GatewayBeat():
                self._gateway_beat(peer, message)
            case WorkerBeat():
                self._worker_beat(peer, message)
            case Inspect():
                self._inspections.append((peer, message))
            case GatewayHello():
                self._gateway_hello(peer, message)
            case WorkerHello():
                self._worker_hello(peer, message)
            case WorkerBye():
                if worker and worker.planner.epoch == message.epoch:
                    self._drop_worker(peer, CERTAIN if message.failed else 0.0)
            case GatewayBye():
                self._lose(peer)

    def _lose(self, peer: bytes) -> None:
        if peer in self._workers:
            self._drop_worker(peer, CERTAIN)
        if self._gateways.pop(peer, None) is not None:
            self.usage.forget(peer)
            for request in self.requests.of(peer):
                self.admission.leave(request, self._now)

    # --- gateways -------------------------------------------------------------------------------

    def _gateway_hello(self, peer: bytes, hello: GatewayHello) -> None:
        if hello.protocol != PROTOCOL:
            self.outbox.send(peer, Refused(_protocol_text(hello.protocol)))
            return
        self._gateways[peer] = self._now
        self.outbox.send(peer, Welcome(self.epoch, PROTOCOL))

    def _gateway_beat(self, peer: bytes, beat: GatewayBeat) -> None:
        self._gateways[peer] = self._now
        unknown = []
        listed = {line.request for line in beat.open}
        for left in self.requests.of(peer):
            if left.id not in listed:
                self.admission.leave(left, self._now)
        for line in beat.open:
            request = self.requests.get(line.request)
            if request is None or request.attempt != line.attempt:
                if self.admission.has_moved(line.request):
                    self.outbox.send(peer, Moved(line.request))
                else:
                    unknown.append(line.request)
                continue
            for choice, position in line.positions.items():
                if sequence := request.sequences.get(choice) or request.finished.get(choice):
                    self._repeat_outputs(sequence, choice, position)
        self.usage.note(peer, beat.used)
        self.outbox.send(peer, self._pulse(unknown, self.usage.elsewhere(peer)))

    def _repeat_outputs(self, sequence: Sequence, choice: int, position: int) -> None:
        """Send again what had been sent before the gateway's last beat, and is not there yet."""
        missing = position < sequence.sent_before or sequence.finish is not None
        if sequence.base <= position <= sequence.sent_before and missing:
            self.outbox.output(sequence, choice, position)
        sequence.sent_before = sequence.sent

    def _pulse(self, unknown: list[str], elsewhere: dict[str, TenantUse]) -> Pulse:
        return Pulse(
            epoch=self.epoch,
            workers=len(self._workers),
            running=self.placement.running,
            waiting=len(self.placement.waiting),
            max_model_len=self.admission.longest,
            unknown=unknown,
            stalled=self.stalled,
            engines=[worker.stats() for worker in self._workers.values()],
            elsewhere=elsewhere,
            cell=self.figures.stats(self.placement, self.admission, self._joined),
        )

    def _answer_inspections(self) -> None:
        """By how things are once everything that came is planned for."""
        workers = {worker.number: worker.planner for worker in self._workers.values()}
        for peer, inspect in self._inspections:
            answer = take_snapshot(self.epoch, inspect, workers, self.placement, self._now)
            self.outbox.send(peer, answer)
        self._inspections.clear()

    @property
    def stalled(self) -> bool:
        """Whether a request could go on and nothing has been computed for a while."""
        return self._now - self._progressed > STALL and any(
            not sequence.paused
            for request in self.requests
            for sequence in request.sequences.values()
        )

    def _submit(self, peer: bytes, submit: Submit) -> None:
        if not self.requests:
            self._progressed = self._now
        self._gateways[peer] = self._now
        self.admission.submit(peer, submit, self._now)

    def _abort(self, abort: Abort) -> None:
        request = self._current(abort)
        if request is None:
            return
        if abort.choices:
            self.requests.abort(request, abort.choices)
        else:
            self.admission.leave(request, self._now)

    def _current(self, message: Abort | Credit) -> Request | None:
        """The request that a message speaks of, unless it went on under another attempt."""
        request = self.requests.get(message.request)
        return request if request and request.attempt == message.attempt else None

    # --- workers --------------------------------------------------------------------------------

    def _worker_hello(self, peer: bytes, hello: WorkerHello) -> None:
        if hello.protocol != PROTOCOL:
            self.outbox.send(peer, Refused(_protocol_text(hello.protocol)))
            return
        for other in self._workers.values():
            if other.planner.worker.fingerprint != hello.fingerprint:
                self.outbox.send(
                    peer, Refused("You serve another model than the workers of this cell.")
                )
                return
        if worker := self._workers.get(peer):
            if worker.may_not_know(self._now):
                self._let_in(peer, worker)
                return
            self._drop_worker(peer)
        self._joined += 1
        planner = Planner(
            hello,
            self.epoch + self._joined,
            lookahead=self.lookahead,
            caching=self.caching,
            check=self.checking,
            drafts=self.drafts,
        )
        worker = Worker(self._joined - 1, planner, heard=self._now, progressed=self._now)
        self._workers[peer] = worker
        self.placement.planners.append(planner)
        self._let_in(peer, worker)

    def _let_in(self, peer: bytes, worker: Worker) -> None:
        """Tell a worker its epoch, again if need be, with all that was ordered under it."""
        self.outbox.send(peer, Join(worker.planner.epoch))
        for flight in worker.planner.flights:
            self.outbox.send(peer, flight.plan)

    def _worker_beat(self, peer: bytes, beat: WorkerBeat) -> None:
        worker = self._workers.get(peer)
        if worker is None:
            self.outbox.send(peer, Fence("You are not, or no longer, of this cell."))
            return
        if worker.planner.epoch != beat.epoch:
            if worker.may_not_know(self._now):
                self._let_in(peer, worker)
            return
        if worker.beat(beat, self._now):
            self._progressed = self._now
        if worker.unreached:
            worker.unreached = False
            self._let_in(peer, worker)
        try:
            for plan in worker.overdue(self._now):
                self.outbox.send(peer, plan)
        except TimeoutError as error:
            self._fence(peer, str(error))

    def _fence(self, peer: bytes, text: str, evidence: float = 0.0) -> None:
        self.outbox.send(peer, Fence(text))
        self._drop_worker(peer, evidence)

    def _drop_worker(self, peer: bytes, evidence: float = 0.0) -> None:
        """All that ran there starts again from its tokens, at its old place in the queue.

        `evidence`: how surely a computation has ended it (`quarantine`).
        """
        worker = self._workers.pop(peer)
        planner = worker.planner
        court, guilty = self.placement.quarantine, list[Request]()
        if evidence:
            guilty = court.judge(planner.flights, worker.heard, evidence)
        self.figures.lost(self.placement.leave(planner), self._now)
        self._had_worker = self._now
        for request in guilty:
            self.figures.quarantined += 1
            self.requests.refuse(request, Reason.QUARANTINED, quarantine.TEXT)

    def _result(self, peer: bytes, result: Result) -> None:
        worker = self._workers.get(peer)
        if worker is None or worker.planner.epoch != result.epoch:
            self.figures.dropped_results += 1
            return
        worker.hear(self._now)
        flights = worker.planner.flights
        if not flights or result.step < flights[0].plan.step:
            self.figures.dropped_results += 1
            return
        try:
            keep(result, flights)
            while flights and (oldest := flights[0].result):
                accepted = worker.planner.accept(oldest)
                self.placement.quarantine.acquit(accepted)
                self.figures.accepted(accepted, self._now)
                self.requests.accept(accepted)
        except ResultError as error:
            self._fence(peer, f"Your result is void: {error}.")
            return
        self._progressed = worker.progressed = self._now

    # --- time and steps -------------------------------------------------------------------------

    def _excuse(self, seconds: float) -> None:
        """The scheduler was stopped for so long, and what came meanwhile is yet to be read."""
        for worker in self._workers.values():
            worker.excuse(seconds)
        for peer in self._gateways:
            self._gateways[peer] += seconds
        self._progressed += seconds

    def _watch(self) -> None:
        """Give up on whoever has been silent or stuck for too long."""
        for peer, worker in list(self._workers.items()):
            if worker.silent(self._now):
                self._fence(peer, "Nothing was heard of you.", DOUBTFUL)
            elif worker.hangs(self._now):
                self._fence(peer, "You make no progress.", DOUBTFUL)
        for peer, heard in list(self._gateways.items()):
            if self._now - heard > GATEWAY_LEASE:
                self._lose(peer)
        if self._now >= self._review_due:
            self._review_due = self._now + REVIEW
            for request in self.requests:
                if self._now - max(request.arrived, self._had_worker) > self.worker_wait:
                    self._refuse_if_nobody_takes(request)

    def _refuse_if_nobody_takes(self, request: Request) -> None:
        if not self._workers:
            text = f"No worker has joined for {self.worker_wait:.0f} seconds."
            self.requests.refuse(request, Reason.NO_WORKER, text)
        elif self.admission.fits_nowhere(request):
            self.admission.refuse_as_too_long(request)

    def _order_steps(self) -> None:
        for peer, worker in self._workers.items():
            while plan := self.placement.plan(worker.planner):
                worker.planner.flights[-1].sent = self._now
                self.figures.ordered(plan)
                self.outbox.send(peer, plan)


def _protocol_text(protocol: int) -> str:
    return f"This scheduler speaks protocol {PROTOCOL}, not {protocol}; install the same version."
