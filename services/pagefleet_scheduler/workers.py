"""The workers of the cell: how they join, what they are sent and answer, when they are given up.

A worker is let in under an epoch of its own, a new one each time; what it says under another is
void. It is lost when the kernel says that its process has ended, when it leaves, when `liveness`
gives it up, or when its result does not fit what was ordered. Then all that ran there waits at its
old place, and `quarantine` judges who may have ended it.
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import TypeAlias

from pagefleet.wire import Fence, Join, Reason, Result, WorkerBeat, WorkerBye, WorkerHello
from pagefleet_scheduler import quarantine
from pagefleet_scheduler.figures import Figures
from pagefleet_scheduler.flights import ResultError, keep
from pagefleet_scheduler.liveness import Worker
from pagefleet_scheduler.outbox import Outbox
from pagefleet_scheduler.placement import Placement
from pagefleet_scheduler.planner import Planner
from pagefleet_scheduler.quarantine import CERTAIN, DOUBTFUL
from pagefleet_scheduler.requests import Requests
from pagefleet_scheduler.sequence import Request

MakePlanner: TypeAlias = Callable[[WorkerHello, int], Planner]
"""Makes the planner of a worker, under an epoch."""


class Workers:
    """The workers that belong to the cell, by their identities."""

    def __init__(
        self,
        epoch: int,
        make_planner: MakePlanner,
        placement: Placement,
        requests: Requests,
        outbox: Outbox,
        figures: Figures,
    ) -> None:
        self.joined = 0
        """How many were let in so far."""
        self.progressed = 0.0
        """When something was last computed, or the first open request came."""
        self._epoch = epoch
        self._make_planner = make_planner
        self._placement = placement
        self._requests = requests
        self._outbox = outbox
        self._figures = figures
        self._members: dict[bytes, Worker] = {}

    def __repr__(self) -> str:
        return f"<Workers {len(self)} of {self.joined} that joined>"

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._members.values())

    def differ(self, fingerprint: str) -> bool:
        """Whether they serve another model than that of this fingerprint; "" is any model's."""
        known = (worker.planner.worker.fingerprint for worker in self)
        return bool(fingerprint) and any(each != fingerprint for each in known)

    def check(self) -> None:
        """Assert the invariant: their planners are those of `placement`."""
        assert [worker.planner for worker in self] == self._placement.planners

    # --- what they say --------------------------------------------------------------------------

    def hello(self, peer: bytes, hello: WorkerHello, now: float) -> None:
        """A worker wants to join, or repeats that it does."""
        if worker := self._members.get(peer):
            if worker.may_not_know(now):
                self._let_in(peer, worker)
                return
            self._drop(peer, now)
        self.joined += 1
        planner = self._make_planner(hello, self._epoch + self.joined)
        worker = Worker(self.joined - 1, planner, heard=now, progressed=now)
        self._members[peer] = worker
        self._placement.join(planner)
        self._let_in(peer, worker)

    def beat(self, peer: bytes, beat: WorkerBeat, now: float) -> None:
        """A worker says how far it is."""
        worker = self._members.get(peer)
        if worker is None:
            self._outbox.send(peer, Fence("You are not, or no longer, of this cell."))
            return
        if worker.planner.epoch != beat.epoch:
            if worker.may_not_know(now):
                self._let_in(peer, worker)
            return
        if worker.beat(beat, now):
            self.progressed = now
        if worker.unreached:
            worker.unreached = False
            self._let_in(peer, worker)
        try:
            for plan in worker.overdue(now):
                self._outbox.send(peer, plan)
        except TimeoutError as error:
            self._fence(peer, str(error), now)

    def result(self, peer: bytes, result: Result, now: float) -> None:
        """A worker has computed a step: its sequences go on once the steps before it are back."""
        worker = self._members.get(peer)
        if worker is None or worker.planner.epoch != result.epoch:
            self._figures.dropped_results += 1
            return
        worker.hear(now)
        flights = worker.planner.flights
        if not flights or result.step < flights[0].plan.step:
            self._figures.dropped_results += 1
            return
        try:
            keep(result, flights)
            while flights and (oldest := flights[0].result):
                worker.planner.pace.landed(flights[0], now)
                accepted = worker.planner.accept(oldest)
                self._placement.quarantine.acquit(accepted)
                self._figures.accepted(accepted, now)
                self._requests.accept(accepted)
        except ResultError as error:
            self._fence(peer, f"Your result is void: {error}.", now)
            return
        self.progressed = worker.progressed = now

    def bye(self, peer: bytes, bye: WorkerBye, now: float) -> None:
        """A worker leaves, of its own will or because a step has failed."""
        worker = self._members.get(peer)
        if worker and worker.planner.epoch == bye.epoch:
            self._drop(peer, now, CERTAIN if bye.failed else 0.0)

    # --- what happens to them -------------------------------------------------------------------

    def lose(self, peer: bytes, now: float) -> None:
        """A process has ended; it may be no worker's."""
        if peer in self._members:
            self._drop(peer, now, CERTAIN)

    def miss(self, peer: bytes) -> None:
        """A message could not be sent; if it was a worker's, it is repeated once that is heard."""
        if worker := self._members.get(peer):
            worker.unreached = True

    def watch(self, now: float) -> None:
        """Give up those that have been silent or stuck for too long."""
        for peer, worker in list(self._members.items()):
            if worker.silent(now):
                self._fence(peer, "Nothing was heard of you.", now, DOUBTFUL)
            elif worker.hangs(now):
                self._fence(peer, "You make no progress.", now, DOUBTFUL)

    def excuse(self, seconds: float) -> None:
        """Discount a time in which the scheduler was stopped and could hear nobody."""
        self.progressed += seconds
        for worker in self:
            worker.excuse(seconds)

    def order_steps(self, now: float) -> None:
        """Send each worker the steps that it can be ordered now."""
        for peer, worker in self._members.items():
            while worker.due <= now and (plan := self._placement.plan(worker.planner)):
                worker.planner.flights[-1].sent = now
                self._figures.ordered(plan)
                self._outbox.send(peer, plan)

    def next_order(self, now: float) -> float:
        """When the next step is to be ordered, if nothing happens before."""
        return min((worker.due for worker in self if worker.due > now), default=inf)

    def _let_in(self, peer: bytes, worker: Worker) -> None:
        """Tell a worker its epoch, again if need be, with all that was ordered under it."""
        self._outbox.send(peer, Join(worker.planner.epoch))
        for flight in worker.planner.flights:
            self._outbox.send(peer, flight.plan)

    def _fence(self, peer: bytes, text: str, now: float, evidence: float = 0.0) -> None:
        self._outbox.send(peer, Fence(text))
        self._drop(peer, now, evidence)

    def _drop(self, peer: bytes, now: float, evidence: float = 0.0) -> None:
        """Remove a worker; all that ran there waits at its old place in the queue.

        `evidence`: how surely it was ended by what it computed (`quarantine`).
        """
        worker = self._members.pop(peer)
        planner = worker.planner
        guilty: list[Request] = []
        if evidence:
            guilty = self._placement.quarantine.judge(planner.flights, worker.heard, evidence)
        self._figures.lost(self._placement.leave(planner, now), now)
        for request in guilty:
            self._figures.quarantined += 1
            self._requests.refuse(request, Reason.QUARANTINED, quarantine.TEXT)
