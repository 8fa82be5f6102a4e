"""A worker's membership in the cell, without I/O, threads and clock: messages and time in, messages
and orders out.

    outside --Join--> member under an epoch --Fence, a failed step--> outside

Outside, the worker says Hello until it is answered, but only once the compute thread has finished
what it was ordered before: a worker whose computation is stuck does not ask for more. As a member
it beats, hands plans to the compute thread in the order of their steps, and sends the results back.

The network may drop, repeat and reorder. A plan that comes too early waits for those before it,
which the scheduler sends again; one that was computed already is answered from the last results,
which are kept for this; a result that found no connection is sent with the next beat. What belongs
to an epoch that was left is void, and so is a Join that is heard twice.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from pagefleet.wire import (
    Fence,
    FromWorker,
    Join,
    Plan,
    Refused,
    Result,
    ToWorker,
    WorkerBeat,
    WorkerBye,
    WorkerHello,
)

BEAT_SECONDS = 0.2
"""Between two beats."""

HELLO_SECONDS = 0.5
"""Between two Hellos that nobody answers."""

RETRY_SECONDS = 0.05
"""Before something that found no connection is sent again."""

REMEMBERED_RESULTS = 2
"""As many steps as the scheduler has under way."""


@dataclass(slots=True)
class Reaction:
    """What follows from an event."""

    messages: list[FromWorker] = field(default_factory=list)
    orders: list[int | Plan] = field(default_factory=list)
    """For the compute thread: epochs to begin from nothing, and steps to run under them."""


class Membership:
    """The state of one worker's talk with the scheduler; see the module's text."""

    def __init__(self, hello: WorkerHello) -> None:
        self.epoch: int | None = None
        self.due = 0.0
        """When `tick` has something to say next."""
        self._hello = hello
        self._left: int | None = None
        self._ordered = -1
        self._early: dict[int, Plan] = {}
        self._under_way = 0
        self._answered: OrderedDict[int, Result] = OrderedDict()
        self._unsent: list[Result] = []

    def __repr__(self) -> str:
        return (
            f"<Membership epoch={self.epoch}, ordered step {self._ordered}, "
            f"{self._under_way} under way>"
        )

    @property
    def busy(self) -> bool:
        """Whether the compute thread has something to do."""
        return self._under_way > 0

    def check(self) -> None:
        """Assert the invariants."""
        assert self._under_way >= 0
        assert len(self._answered) <= REMEMBERED_RESULTS
        assert all(step > self._ordered + 1 for step in self._early)
        assert self.epoch is not None or not (self._early or self._answered or self._unsent)
        assert self.epoch is None or self.epoch != self._left

    def tick(self, now: float, progress: int, lives: bool = True) -> Reaction:
        """Say Hello or beat, if it is time.

        Args:
            now: seconds of a clock that never goes back.
            progress: the counter that the compute thread advances at every layer.
            lives: whether all of the engine does; otherwise nothing is said.
        """
        if now < self.due:
            return Reaction()
        if not lives:
            self.due = now + BEAT_SECONDS
            return Reaction()
        if self.epoch is None:
            self.due = now + HELLO_SECONDS
            return Reaction([] if self.busy else [self._hello])
        self.due = now + BEAT_SECONDS
        results, self._unsent = self._unsent, []
        return Reaction([*results, WorkerBeat(self.epoch, progress, self.busy)])

    def unsent(self, message: FromWorker, now: float) -> None:
        """A message found no connection: it, or what takes its place, is said again soon."""
        self.due = min(self.due, now + RETRY_SECONDS)
        if isinstance(message, Result) and message.epoch == self.epoch:
            self._unsent.append(message)

    def leave(self, *, failed: bool = False) -> Reaction:
        """End the epoch: the process stops, or a step has failed."""
        if self.epoch is None:
            return Reaction()
        farewell = WorkerBye(self.epoch, failed)
        self._end()
        return Reaction([farewell])

    def computed(self, plan: Plan, result: Result | None) -> Reaction:
        """The compute thread is done with a step; None: the step failed, or one before it did."""
        self._under_way -= 1
        if plan.epoch != self.epoch:
            if self.epoch is None and not self.busy:
                self.due = 0.0
            return Reaction()
        if result is None:
            return self.leave(failed=True)
        self._answered[plan.step] = result
        if len(self._answered) > REMEMBERED_RESULTS:
            self._answered.popitem(last=False)
        return Reaction([result])

    def handle(self, message: ToWorker) -> Reaction:
        """Take a message of the scheduler in."""
        match message:
            case Plan():
                return self._plan(message) if message.epoch == self.epoch else Reaction()
            case Join():
                return self._join(message.epoch)
            case Fence():
                self._end()
            case Refused():
                pass
        return Reaction()

    def _join(self, epoch: int) -> Reaction:
        if epoch in (self.epoch, self._left):
            return Reaction()
        self._end()
        self.epoch, self.due = epoch, 0.0
        return Reaction(orders=[epoch])

    def _end(self) -> None:
        """Leave the epoch, if there is one; it is not entered again."""
        if self.epoch is None:
            return
        self._left, self.epoch = self.epoch, None
        self.due = 0.0
        self._ordered = -1
        self._early.clear()
        self._answered.clear()
        self._unsent.clear()

    def _plan(self, plan: Plan) -> Reaction:
        if plan.step <= self._ordered:
            known = self._answered.get(plan.step)
            return Reaction([known] if known else [])
        self._early[plan.step] = plan
        reaction = Reaction()
        while (following := self._early.pop(self._ordered + 1, None)) is not None:
            reaction.orders.append(following)
            self._ordered += 1
        self._under_way += len(reaction.orders)
        return reaction
