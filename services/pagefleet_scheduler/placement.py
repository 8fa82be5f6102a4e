"""Where sequences are: each waits in the cell's queue, or runs at one worker."""

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from pagefleet.wire import Plan
from pagefleet_scheduler import router
from pagefleet_scheduler.capacity import Capacity
from pagefleet_scheduler.planner import Planner
from pagefleet_scheduler.quarantine import Quarantine, is_trial
from pagefleet_scheduler.queue import Capacities, Queue
from pagefleet_scheduler.sequence import Request, Sequence


class Placement:
    """The queue, and the planners of all workers."""

    def __init__(self) -> None:
        self.waiting = Queue(self._eligible)
        self.planners: list[Planner] = []
        self._alike: dict[Capacity, list[Planner]] = {}
        self._all, self._least = Capacities(), Capacity.least(())
        """The capacities of all workers, and what fits them all."""
        self.missed: dict[Capacity, float] = {}
        """The capacities of workers that may come back, and when the last of each was lost."""
        self.quarantine = Quarantine()
        self.gathering = False
        """Whether some workers may not have been heard yet: streams wait for those of their class
        of numerics, and nothing is too long for good."""
        self.class_changes = 0
        """Times that a sequence with outputs went on at a worker of another class."""

    def __repr__(self) -> str:
        return f"<Placement {len(self.waiting)} wait, {self.running} run>"

    @property
    def running(self) -> int:
        """Sequences that have a slot somewhere."""
        return sum(len(planner.running) for planner in self.planners)

    def stop(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended from wherever it is, and free its blocks."""
        if sequence.slot is not None:
            self._planner_of(sequence).remove(sequence)
        else:
            self.waiting.remove(sequence)

    def share(self, sequences: list[Sequence]) -> None:
        """Let forks run where their parent, the first of `sequences`, runs; else they wait."""
        parent, *forks = sequences
        if forks and parent.slot is not None:
            self._planner_of(parent).fork(sequences)
            return
        for fork in forks:
            fork.forget_run()
            self.waiting.add(fork)

    def gather(self, gathering: bool) -> None:
        """Some workers may not have been heard yet, or all have been by now."""
        if gathering != self.gathering:
            self.gathering = gathering
            self.waiting.regroup()

    def join(self, planner: Planner) -> None:
        """A worker is there."""
        self.planners.append(planner)
        alike = self._alike.setdefault(planner.capacity, [])
        alike.append(planner)
        if len(alike) == 1:
            self._see_capacities()

    def leave(self, planner: Planner, now: float) -> list[Sequence]:
        """A worker is lost: what ran there waits at its old place, and starts from its tokens."""
        self.missed[planner.capacity] = now
        self.planners.remove(planner)
        self._alike[planner.capacity].remove(planner)
        if not self._alike[planner.capacity]:
            del self._alike[planner.capacity]
            self._see_capacities()
        abandoned = planner.abandon()
        for sequence in abandoned:
            self.waiting.add(sequence)
        return abandoned

    def give_up(self, since: float) -> None:
        """Expect none of the workers back that were lost before."""
        self.missed = {each: lost for each, lost in self.missed.items() if lost >= since}

    def excuse(self, seconds: float) -> None:
        """Discount a time in which the scheduler was stopped and could hear nobody."""
        self.missed = {each: lost + seconds for each, lost in self.missed.items()}

    def admit(self, now: float) -> None:
        """Let sequences begin to run, in the queue's order.

        One that finds no room reserves every worker at which it could run, so that nobody later
        gets there first; later ones may still run at other workers. One that no worker could ever
        hold, or whose client takes nothing for now, reserves none. A paused sequence gives up its
        blocks to anyone. Beams of one search may be partly running and partly waiting, so that
        those that run hold blocks and do nothing. Lest searches wait for each other for ever, a
        waiting beam preempts any later sequence, and every sequence preempts later beams that do
        nothing.
        """
        for planner in self.planners:
            planner.cache.pool.settle()
        queued, reserved = router.Queued(), set[Capacity]()
        for sequence in self.waiting.walk(reserved):
            if sequence.paused:
                continue
            if not self._admit(sequence, self.free(sequence, reserved), queued, now):
                reserved.update(self.waiting.capacities(sequence))

    def free(self, sequence: Sequence, reserved: set[Capacity]) -> list[Planner]:
        """Workers at which a waiting sequence could run, without those that are reserved."""
        capacities = self.waiting.capacities(sequence)
        return self._planners_of(each for each in capacities if each not in reserved)

    def _planners_of(self, capacities: Iterable[Capacity]) -> list[Planner]:
        """Of workers of these capacities, in the order in which they joined."""
        planners = (planner for capacity in capacities for planner in self._alike[capacity])
        return sorted(planners, key=attrgetter("epoch"))

    def _finds_its_prefix_soon(self, sequence: Sequence) -> bool:
        """Whether a beam should wait for another that computes what they can share."""
        return sequence.request.search is not None and any(
            planner.computes_prefix_of(sequence) for planner in self.planners
        )

    def _admit(
        self, sequence: Sequence, planners: list[Planner], queued: router.Queued, now: float
    ) -> bool:
        if sequence.flying or self._finds_its_prefix_soon(sequence):
            return False
        while (chosen := router.choose(sequence, planners, queued)) is None:
            if not self._preempt_for(sequence, planners):
                return False
            queued.clear()
        self.waiting.remove(sequence)
        request = sequence.request
        if request.began is None:
            request.began = now
            self.waiting.charge(request, len(request.prompt))
        if sequence.outputs and sequence.numerics not in (0, chosen.capacity.numerics):
            self.class_changes += 1
        chosen.admit(sequence)
        queued.admitted(sequence, chosen)
        return True

    def _eligible(self, sequence: Sequence) -> Capacities:
        """Workers that can hold it to its end; only those of its class of numerics, if any is."""
        needs, numerics = sequence.request.needs, sequence.numerics
        able = self._all
        if not self._least.fits(needs):
            able = frozenset(each for each in able if each.fits(needs))
        if not numerics:
            return able
        same = frozenset(each for each in able if each.numerics == numerics)
        return same if same or self.gathering else able

    def _see_capacities(self) -> None:
        """There are others than before."""
        self._all, self._least = frozenset(self._alike), Capacity.least(self._alike)
        self.waiting.regroup()

    def _preempt_for(self, sequence: Sequence, planners: Iterable[Planner]) -> bool:
        """Preempt one sequence that must make room for another; returns whether there is any."""
        for planner in planners:
            if victim := planner.paused_one() or _victim(sequence, planner.running):
                planner.preempt(victim)
                planner.cache.pool.settle()
                return True
        return False

    def plan(self, planner: Planner) -> Plan | None:
        """A worker's next step, if there is one to order now; whoever it preempts waits."""
        return planner.plan(trial=self.quarantine.active and planner is self._court())

    def _court(self) -> Planner | None:
        """The one worker at which suspects may run now."""
        sitting = (planner for planner in self.planners if is_trial(planner.flights))
        called = (planner for planner in self.planners if planner.has_suspect)
        return next(sitting, None) or next(called, None)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that some worker can hold, or one that may come back; 0
        while that is not known.
        """
        if self.gathering:
            return 0
        return max((each.longest for each in (*self._alike, *self.missed)), default=0)

    def fits_nowhere(self, request: Request) -> bool:
        """Whether there are workers, and all are heard, but none at which it could run."""
        if self.gathering or not self.planners:
            return False
        return not any(capacity.fits(request.needs) for capacity in self._alike)

    def misses_one_for(self, request: Request) -> bool:
        """Whether a worker at which it could run was lost, and may come back."""
        return any(capacity.fits(request.needs) for capacity in self.missed)

    def check(self, requests: Iterable[Request]) -> None:
        """Assert the invariants: every unfinished sequence, and no other, is at exactly one place.

        Args:
            requests: all that are open.
        """
        for planner in self.planners:
            planner.check()
        assert all(self._alike.values())
        assert self._all == self._alike.keys()
        assert self.planners == self._planners_of(self._alike)
        running = [sequence for planner in self.planners for sequence in planner.running]
        placed = {id(sequence) for sequence in [*running, *self.waiting]}
        assert len(placed) == len(running) + len(self.waiting)
        assert placed == {id(each) for request in requests for each in request.sequences.values()}
        self.waiting.check()
        self.quarantine.check([*running, *self.waiting])
        self._check_flights([*running, *self.waiting])
        assert all(each.slot is None and not each.table for each in self.waiting)
        assert all(
            self._planner_of(each) is planner
            for planner in self.planners
            for each in planner.running
        )

    def _check_flights(self, sequences: Iterable[Sequence]) -> None:
        """Assert that each knows its rows that are under way, and the samples it counts on."""
        flights = [flight for planner in self.planners for flight in planner.flights]
        flying = Counter(row.sequence for flight in flights for row in flight.rows)
        ahead = Counter(row.sequence for flight in flights for row in flight.rows if row.ahead)
        assert all(each.flying == flying[each] for each in sequences)
        assert all(each.ahead == ahead[each] for each in sequences)

    def _planner_of(self, sequence: Sequence) -> Planner:
        return next(planner for planner in self.planners if planner.epoch == sequence.epoch)


def _victim(sequence: Sequence, running: list[Sequence]) -> Sequence | None:
    """The latest of those that run behind a waiting sequence, if that may preempt it."""
    for latest in reversed(running):
        if latest.order < sequence.order or latest.request is sequence.request:
            return None
        if sequence.request.search is not None or latest.idles:
            return latest
    return None
