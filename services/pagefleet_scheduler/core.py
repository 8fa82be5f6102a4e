"""The scheduler: events in, messages out. No socket, clock, thread, tensor or text.

    handle([Arrived(peer, message), Lost(peer), ...], now) -> [Send(peer, message), ...]

All that has arrived is handled together and planned for once; an empty list of events is the tick
of a clock (every 50 ms). The same object runs in production, in unit tests and in simulations.

This file says which part of the scheduler hears of what, and in which order the parts act.
`gateways` and `workers` are the peers. A message that could not be sent proves nothing about its
receiver: beats show what has not arrived, and who is alive. `admission` takes requests in,
`requests` knows what clients asked for, `placement` where each sequence is, a `planner` per worker
what to compute next, `outbox` what to send.

All that a sequence owns is its tokens. When its worker is lost, it returns to its old place in the
queue and is computed again, by whichever worker takes it. A gateway that missed something says so
in its beat and gets it again; to a new scheduler the gateways submit everything again, with the
tokens that they have.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from pagefleet.wire import (
    PROTOCOL,
    Abort,
    Credit,
    GatewayBeat,
    GatewayBye,
    GatewayHello,
    Inspect,
    Pulse,
    Reason,
    Refused,
    Result,
    Submit,
    ToScheduler,
    WorkerBeat,
    WorkerBye,
    WorkerHello,
)
from pagefleet_scheduler.admission import Admission
from pagefleet_scheduler.figures import Figures
from pagefleet_scheduler.gateways import Gateways
from pagefleet_scheduler.outbox import Outbox, Send
from pagefleet_scheduler.placement import Placement
from pagefleet_scheduler.planner import Planner
from pagefleet_scheduler.queue import DEFAULT_ROOM, Room
from pagefleet_scheduler.requests import Requests
from pagefleet_scheduler.sequence import Request
from pagefleet_scheduler.snapshot import take_snapshot
from pagefleet_scheduler.workers import Workers

REVIEW = 1.0
"""Seconds between two searches for requests that no worker can take."""

ABSENCE = 0.5
"""Seconds without a call after which this process must have been stopped: there is a tick every
50 ms."""

GATHERING = 1.0
"""Seconds that workers have to be heard after the scheduler began, or was stopped."""

STALL = 2.0
"""Seconds without progress anywhere after which a cell with open requests counts as stalled."""

_MODEL_TEXT = "You serve another model than the workers of this cell."


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
    """A message could not be sent: its peer has no connection for now, or a full queue."""

    peer: bytes


Event: TypeAlias = Arrived | Lost | Unreachable


class Scheduler:
    """The state of the cell, and what to do next."""

    def __init__(
        self,
        epoch: int,
        *,
        lookahead: bool = True,
        caching: bool = True,
        check: bool = False,
        room: Room = DEFAULT_ROOM,
        worker_wait: float = 30.0,
        drafts: int | None = 0,
        prioritized: bool = True,
    ) -> None:
        self.epoch = epoch
        self.checking = check
        self.worker_wait = worker_wait
        self.placement = Placement()
        self.outbox = Outbox(epoch)
        self.requests = Requests(self.placement, self.outbox)
        self.admission = Admission(
            self.requests, self.placement, self.outbox, room, prioritized=prioritized
        )
        self.figures = Figures()
        self.gateways = Gateways(epoch, self.placement, self.requests, self.admission, self.outbox)
        make_planner = partial(
            Planner,
            requeue=self.placement.waiting.add,
            lookahead=lookahead,
            caching=caching,
            check=check,
            drafts=drafts,
        )
        self.workers = Workers(
            epoch, make_planner, self.placement, self.requests, self.outbox, self.figures
        )
        self._review_due = 0.0
        self._inspections: list[tuple[bytes, Inspect]] = []
        self._now = 0.0
        self._began = 0.0
        """When the first call came, later by all the time that this process was stopped."""
        self._gathered = 0.0

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self.requests)} requests, {len(self.gateways)} gateways, "
            f"{len(self.workers)} workers, {self.placement!r}>"
        )

    def handle(self, events: Iterable[Event], now: float) -> list[Send]:
        """Take in what happened, and say what to send.

        Args:
            events: in the order in which they came.
            now: seconds on a monotonic clock.
        """
        if (absence := now - self._now) > ABSENCE:
            self.gateways.excuse(absence)
            self.workers.excuse(absence)
            self.placement.excuse(absence)
            self._began += absence
            self._gathered = now + GATHERING
        self._now = now
        self.placement.gather(now < self._gathered)
        for event in events:
            match event:
                case Lost(peer):
                    self.workers.lose(peer, now)
                    self.gateways.lose(peer, now)
                case Unreachable(peer):
                    self.workers.miss(peer)
                case Arrived(peer, message):
                    self._arrived(peer, message, now)
        self.workers.watch(now)
        self.gateways.watch(now)
        self._review(now)
        self.admission.watch(now)
        self.placement.admit(now)
        self.workers.order_steps(now)
        self._answer_inspections()
        if self.checking:
            self.check()
        return self.outbox.flush()

    def check(self) -> None:
        """Assert the invariants.

        Raises:
            AssertionError: one does not hold; that is a bug of ours.
        """
        self.workers.check()
        self.placement.check(self.requests)
        self.admission.check()
        self.requests.check()
        assert all(request.gateway in self.gateways for request in self.requests)

    @property
    def due(self) -> float:
        """When `handle` is to be called next, though nothing has happened."""
        return self.workers.next_order(self._now)

    @property
    def stalled(self) -> bool:
        """Whether a request could go on, but nothing has been computed for a while."""
        return self._now - self.workers.progressed > STALL and any(
            not sequence.paused
            for request in self.requests
            for sequence in request.sequences.values()
        )

    # --- messages -------------------------------------------------------------------------------

    def _arrived(self, peer: bytes, message: ToScheduler, now: float) -> None:
        if peer in self.gateways:
            self.gateways.hear(peer, now)
        match message:
            case GatewayHello() | WorkerHello() if message.protocol != PROTOCOL:
                self.outbox.send(peer, Refused(_protocol_text(message.protocol)))
            case GatewayHello() | GatewayBeat() if self.workers.differ(message.fingerprint):
                self.outbox.send(peer, Refused(_MODEL_TEXT))
                self.gateways.lose(peer, now)
            case Result():
                self.workers.result(peer, message, now)
            case Submit():
                self._submit(peer, message, now)
            case Abort():
                self._abort(message, now)
            case Credit():
                if request := self._current(message):
                    self.requests.allow(request, message.limits)
            case GatewayBeat():
                self.gateways.hear(peer, now)
                unknown = self.gateways.beat(peer, message, now)
                self.outbox.send(peer, self._pulse(peer, unknown))
            case WorkerBeat():
                self.workers.beat(peer, message, now)
            case Inspect():
                self._inspections.append((peer, message))
            case GatewayHello():
                self.gateways.hello(peer, now)
            case WorkerHello() if self.workers.differ(message.fingerprint):
                self.outbox.send(peer, Refused(_MODEL_TEXT))
            case WorkerHello():
                self.workers.hello(peer, message, now)
            case WorkerBye():
                self.workers.bye(peer, message, now)
            case GatewayBye():
                self.gateways.lose(peer, now)

    def _submit(self, peer: bytes, submit: Submit, now: float) -> None:
        if not self.requests:
            self.workers.progressed = now
        self.gateways.hear(peer, now)
        self.admission.submit(peer, submit, now)

    def _abort(self, abort: Abort, now: float) -> None:
        request = self._current(abort)
        if request is None:
            return
        if abort.choices:
            self.requests.abort(request, abort.choices)
        else:
            self.admission.leave(request, now)

    def _current(self, message: Abort | Credit) -> Request | None:
        """The request that a message is about, unless it is at another attempt by now."""
        request = self.requests.get(message.request)
        return request if request and request.attempt == message.attempt else None

    def _pulse(self, peer: bytes, unknown: list[str]) -> Pulse:
        return Pulse(
            epoch=self.epoch,
            workers=len(self.workers),
            running=self.placement.running,
            waiting=len(self.placement.waiting),
            max_model_len=self.placement.longest,
            unknown=unknown,
            stalled=self.stalled,
            engines=[worker.stats() for worker in self.workers],
            elsewhere=self.gateways.usage.elsewhere(peer),
            cell=self.figures.stats(self.placement, self.admission, self.workers.joined),
        )

    def _answer_inspections(self) -> None:
        """Answer at the end, so that snapshots show the state after planning."""
        planners = {worker.number: worker.planner for worker in self.workers}
        for peer, inspect in self._inspections:
            answer = take_snapshot(self.epoch, inspect, planners, self.placement, self._now)
            self.outbox.send(peer, answer)
        self._inspections.clear()

    # --- what nobody takes ----------------------------------------------------------------------

    def _review(self, now: float) -> None:
        """Refuse what has waited too long for a worker that can take it."""
        if now < self._review_due:
            return
        self._review_due = now + REVIEW
        self.placement.give_up(now - self.worker_wait)
        for request in self.requests:
            if now - max(request.arrived, self._began) > self.worker_wait:
                self._refuse_if_nobody_takes(request)

    def _refuse_if_nobody_takes(self, request: Request) -> None:
        if not self.workers and not self.placement.missed:
            text = f"No worker has joined for {self.worker_wait:.0f} seconds."
            self.requests.refuse(request, Reason.NO_WORKER, text)
        elif self.admission.is_too_long(request):
            self.admission.refuse_as_too_long(request)


def _protocol_text(protocol: int) -> str:
    return f"This scheduler speaks protocol {PROTOCOL}, not {protocol}; install the same version."
