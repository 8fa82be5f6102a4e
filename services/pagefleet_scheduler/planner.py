"""One worker's next plan: who gets tokens, who gets blocks, who has to give blocks back.

`plan` goes through the running sequences, oldest first, and gives each a row with as many of its
pending positions as the step's budget allows. Sequences that need one token get it even beside a
long prefill (chunked prefill, Agrawal et al., "Sarathi-Serve", OSDI 2024, section 4). A sequence
that needs a block when there is none takes it from the latest running one, which loses all its
blocks and is computed again later (preemption by recomputation, PagedAttention, section 4.5). A
block that two tables share is copied before one of them writes to it (section 4.4).

Up to two steps may be under way (`flights`): the input of a row in the second may be the token that
the first is still to sample. Blocks that become free while a plan is made are handed out from the
next plan on. A row whose input is all known may end with drafts, as far as its blocks have room
(`speculation`).

Two rules keep this right, whatever is aborted, preempted or late in between:

1. The worker is told of a slot with the first row of a run, and of new table entries with the next
   row of their sequence.
2. Results are matched with the rows kept in `flights`. If a row's sequence has begun another run
   since, its token still counts, but it says nothing about blocks.
"""

from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable

from pagefleet.wire import Plan, Result, WorkerHello
from pagefleet_scheduler.capacity import Capacity
from pagefleet_scheduler.flights import Accepted, Flight, ResultError, Sampled, agreeing
from pagefleet_scheduler.kv_cache import KVCache
from pagefleet_scheduler.pace import Pace
from pagefleet_scheduler.plan_writer import PlanWriter
from pagefleet_scheduler.prompt_lookup import NO_DRAFTS
from pagefleet_scheduler.quarantine import turns
from pagefleet_scheduler.sequence import Sequence
from pagefleet_scheduler.slots import SlotBook
from pagefleet_scheduler.speculation import MOST, NO_DRAFTS_PAY, Speculation


class Planner:
    """The running sequences of one worker, its slots and its blocks."""

    def __init__(
        self,
        worker: WorkerHello,
        epoch: int,
        *,
        requeue: Callable[[Sequence], None],
        lookahead: bool = True,
        caching: bool = True,
        check: bool = False,
        drafts: int | None = 0,
    ) -> None:
        """Plan for a worker under its epoch.

        Args:
            worker: what it said of itself.
            epoch: all that is said under another is void.
            requeue: is given each sequence that lost its slot and blocks, and has to wait.
            lookahead: order a step while another is under way.
            caching: share the blocks of equal prefixes.
            check: send whole tables.
            drafts: at most, a row; None: `MOST` if they change no bit at this worker, else none.
        """
        self.worker = worker
        self.capacity = Capacity.of(worker, caching=caching)
        self.epoch = epoch
        self._requeue = requeue
        self.depth = 2 if lookahead else 1
        self.checking = check
        self.pace = Pace()
        usual = MOST if worker.exact else 0
        self.speculation = Speculation(usual if drafts is None else drafts, self.pace)
        self.cache = KVCache(worker, caching=caching)
        self.running: list[Sequence] = []
        self.flights: deque[Flight] = deque()
        self.copies = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

        self._step = 0
        self._asked = (0, 0)
        self._waits = False
        self._watermark = max(1, worker.blocks // 100)
        self._slots = SlotBook(worker.slots)

    def __repr__(self) -> str:
        return f"<Planner {len(self.running)} running, step {self._step}, {self.cache!r}>"

    # --- who runs here --------------------------------------------------------------------------

    def computes_prefix_of(self, sequence: Sequence) -> bool:
        """Whether another beam of its search is computing the prompt's full blocks here."""
        size = self.worker.block_size
        return self.cache.pool.caching and any(
            running.belongs_with(sequence)
            and running.indexed < len(sequence.request.prompt) // size
            for running in self.running
        )

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether there is a slot, and blocks for all that the sequence has, with some to spare."""
        return self.has_slot and self.wanted(sequence) <= self.cache.pool.available

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free."""
        return self._slots.available

    @property
    def has_suspect(self) -> bool:
        """Whether a suspect could have a row now."""
        return any(each.suspicion and each.pending > 0 for each in self.running)

    def wanted(self, sequence: Sequence) -> int:
        """Blocks that must be available to admit the sequence, those to spare included."""
        others = not all(running.belongs_with(sequence) for running in self.running)
        return self.cache.wanted(sequence) + (self._watermark if others else 0)

    def admit(self, sequence: Sequence) -> None:
        """Give a slot and blocks to a sequence for which `can_admit` holds.

        A beam loses its candidates, and computes them again with its last block: its forks share
        computed blocks only.
        """
        found = self.cache.begin(sequence)
        sequence.ordered = sequence.computed = found
        sequence.epoch, sequence.slot = self.epoch, self._slots.take()
        sequence.candidates = None
        sequence.numerics = self.capacity.numerics
        self.prefix_queries += len(sequence.tokens)
        self.prefix_hits += found
        if sequence.run == 0:
            sequence.cached = min(found, len(sequence.request.prompt))
        insort(self.running, sequence, key=lambda running: running.order)

    def fork(self, sequences: list[Sequence]) -> None:
        """Let forks run beside their parent, the first of `sequences`, which runs here.

        They share its blocks. Those for which there is no slot have to wait.
        """
        parent, *others = sequences
        assert parent.slot is not None
        for other in others:
            if not self._slots.available:
                other.forget_run()
                self._requeue(other)
                continue
            self.cache.share(other)
            other.slot = self._slots.take()
            self._slots.fork(other.slot, parent.slot, other.choices[0])
            insort(self.running, other, key=lambda running: running.order)
        parent.writable = 0
        self._slots.fork(parent.slot, parent.slot, parent.choices[0])

    def remove(self, sequence: Sequence) -> None:
        """Take back slot and blocks of a sequence that has ended, or has to wait."""
        assert sequence.slot is not None
        self.running.remove(sequence)
        self.cache.release(sequence)
        self._slots.give_back(sequence.slot, sequence.opened)
        sequence.forget_run()

    # --- the next step --------------------------------------------------------------------------

    def plan(self, *, trial: bool = False) -> Plan | None:
        """The next step, or None if nothing can be computed or enough is under way.

        `trial`: suspects may run here now (`quarantine`).
        """
        if len(self.flights) >= self.depth:
            return None
        if self.flights and self._waits_for_result():
            return None
        pool = self.cache.pool
        pool.settle()
        writer = self._write_rows(trial)
        if not writer.planned and pool.settling:  # of whoever was preempted just now
            pool.settle()
            writer = self._write_rows(trial)
        if not writer.planned:
            return None
        slots, swaps = self._slots.take_orders(), self.cache.host.take_orders()
        plan = writer.plan(self.epoch, self._step, slots, swaps)
        self.copies += len(writer.copies) // 2
        self._step += 1
        self.flights.append(Flight(plan, writer.planned))
        return plan

    def _waits_for_result(self) -> bool:
        """Whether drafts make waiting pay: decided once a step, and when sequences come or go."""
        asked = self._step, len(self.running)
        if asked != self._asked:
            self._asked = asked
            self._waits = self.speculation.pays_to_wait(self.running)
        return self._waits

    def _write_rows(self, trial: bool) -> PlanWriter:
        """Rows for the first group of sequences (`turns`) that can have any."""
        writer = PlanWriter(self.checking)
        for sequences in turns(self.running, self.flights, self._step, trial):
            self._fill(writer, sequences)
            if writer.planned:
                break
        return writer

    def _fill(self, writer: PlanWriter, sequences: list[Sequence]) -> None:
        """Give these sequences rows, in order, until the step is full.

        Of the `budget` of tokens that is left, `single` are for later sequences that need one each,
        and at most `prompts` for those that need more. `spare` are the logits left for drafts.
        """
        able = [(sequence, pending) for sequence in sequences if (pending := sequence.pending) > 0]
        if not able:
            return
        budget = self.worker.max_batched_tokens
        counts = [pending for _, pending in able]
        single = counts.count(1)
        waiting = sum(counts) - single
        prompts = self.pace.most_of_prompts(waiting, single > 0) if waiting else 0
        spare = self.worker.slots - len(able)  # logits for which a worker has memory
        price = self.speculation.price(single) if not waiting else NO_DRAFTS_PAY
        for sequence, pending in able:
            single -= pending == 1
            if sequence.slot is None or not (sequence.opened or writer.may_open):
                continue
            if budget == 0:
                break
            count = pending if pending == 1 else min(pending, max(budget - single, 1), prompts)
            if count == 0:
                continue
            end = sequence.ordered + count
            if end <= sequence.writable or self._make_writable(sequence, end, writer):
                drafts = NO_DRAFTS
                if count == pending and not (sequence.ahead or sequence.waits_for_others):
                    room = min(self._room(sequence), budget - single - count, spare)
                    drafts = self.speculation.drafts(sequence, room, price)
                writer.add_row(sequence, count, drafts)
                budget -= count + len(drafts.tokens)
                prompts -= count if pending > 1 else 0
                spare -= len(drafts.tokens)

    def _room(self, sequence: Sequence) -> int:
        """Drafts for which the sequence has blocks already."""
        return len(sequence.table) * self.worker.block_size - len(sequence.tokens)

    def _make_writable(self, sequence: Sequence, end: int, writer: PlanWriter) -> bool:
        """Give the sequence blocks of its own for its positions up to `end`; whether it has them.

        They can be taken from later sequences, which have no row in this plan yet. If what those
        give back is still settling, or all others are older, the sequence waits for another plan.
        """
        pool, table = self.cache.pool, sequence.table
        first = sequence.ordered // pool.block_size
        missing = max(self.cache.blocks_for(end) - len(table), 0)
        copied = first < len(table) and pool.shared(table[first])
        wanted = missing + copied
        while pool.available < wanted:
            if pool.available + pool.settling >= wanted:
                return False
            victim = self._victim(sequence)
            if victim is None:
                return False
            self.preempt(victim)
        if copied:
            shared = table[first]
            writer.copy(sequence, first, pool.allocate())
            pool.release([shared])
        sequence.append_blocks([pool.allocate() for _ in range(missing)])
        sequence.writable = len(table) * pool.block_size
        return True

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """A paused sequence, or the latest one behind `sequence` that is not protected.

        The oldest of all may take from anyone, so that it always goes on.
        """
        if paused := self.paused_one():
            return paused
        for latest in reversed(self.running):
            if latest is sequence or latest.belongs_with(sequence):
                return None
            if not latest.protected or sequence is self.running[0]:
                return latest
        return None

    def paused_one(self) -> Sequence | None:
        """The latest sequence that holds blocks and whose client takes nothing for now."""
        return next((each for each in reversed(self.running) if each.paused), None)

    def preempt(self, victim: Sequence) -> None:
        """Take back all that a sequence has, and let it wait; beams of one search go together."""
        gang = [victim]
        if victim.request.search is not None:
            gang = [beam for beam in self.running if beam.request is victim.request]
        for sequence in gang:
            self.remove(sequence)
            self._requeue(sequence)
        self.preemptions += len(gang)

    # --- what came of it ------------------------------------------------------------------------

    def accept(self, result: Result) -> Accepted:
        """Take the result of the oldest step under way.

        Raises:
            ResultError: it is another step's, or it does not fit the plan.
        """
        if not self.flights:
            raise ResultError(f"step {result.step} is not the one that is awaited")
        rows, (samples, pieces) = self.flights[0].rows, self.flights[0].samples_of(result)
        self.flights.popleft()
        errors = {error.row: error.text for error in result.errors}
        embeddings = dict(result.embeddings)
        accepted, end = Accepted(), 0
        for number, row in enumerate(rows):
            begin, end = end, end + row.samples
            sequence = row.sequence
            sequence.ahead -= row.ahead
            sequence.flying -= 1
            if sequence.finish is not None:
                continue
            if number in errors:
                accepted.failed.append((sequence, errors[number]))
                continue
            last, kept = end, row.drafts.tokens
            if kept:
                kept = kept[: agreeing(kept, samples[begin:end])]
                last = begin + len(kept) + 1
                self.speculation.judge(row.drafts, len(kept))
            if sequence.run == row.run:
                self._computed(sequence, row.end, kept)
            if begin < end:
                sequence.proven = sequence.slot is not None
                sampled = Sampled(sequence, samples[begin:last], pieces[begin:last])
                accepted.sampled.append(sampled)
            elif row.end == sequence.length:
                accepted.completed[sequence] = embeddings.get(number)
        accepted.prompts = [(rows[piece.row].sequence, piece) for piece in result.prompts]
        return accepted

    def _computed(self, sequence: Sequence, end: int, kept: "array[int]") -> None:
        """Positions before `end`, and behind it those of the drafts `kept`, are certain now."""
        assert not kept or end == len(sequence.tokens)
        sequence.computed = end + len(kept)
        if sequence.ordered > sequence.computed and not sequence.flying:
            sequence.ordered = sequence.computed
        self.cache.index(sequence, kept)

    def abandon(self) -> list[Sequence]:
        """The worker is lost: returns all that ran here, to start again from their tokens."""
        for flight in self.flights:
            for row in flight.rows:
                row.sequence.ahead = row.sequence.flying = 0
        self.flights.clear()
        lost, self.running = self.running, []
        for sequence in lost:
            sequence.forget_run()
        return lost

    def check(self) -> None:
        """Assert the invariants of the pool, the slots and the counts."""
        self.cache.check(self.running)
        taken = [sequence.slot for sequence in self.running if sequence.slot is not None]
        assert len(taken) == len(self.running)
        self._slots.check(taken)
        assert self.running == sorted(self.running, key=lambda sequence: sequence.order)
        assert len(self.flights) <= self.depth
        size = self.cache.pool.block_size
        for sequence in self.running:
            sequence.check()
            assert sequence.finish is None
            assert sequence.ordered <= sequence.length + self.speculation.most
            assert self.cache.blocks_for(sequence.ordered) <= len(sequence.table)
            first, end = sequence.ordered // size, self.cache.blocks_for(sequence.writable)
            assert end <= len(sequence.table)
            assert not any(map(self.cache.pool.shared, sequence.table[first:end]))
            assert sequence.indexed * size <= sequence.computed
