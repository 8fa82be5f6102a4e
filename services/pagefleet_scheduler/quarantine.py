"""Quarantine: finding the request that ends workers, and sparing all others.

Some inputs crash whatever computes them. The scheduler cannot see why a worker died, but it knows
which rows were under way. The rules:

- When a worker is lost, all sequences whose rows were under way become suspects; those that had no
  token from it yet are tried first.
- Suspects run alone: each row of theirs is a step of its own, ordered when nothing else is under
  way, in turn with steps of all others, and at one worker of the cell at a time. A token clears.
- A death that a suspect shared with nobody counts against it if the worker seemed alive when the
  step was ordered; it counts half if nobody saw the worker end, and it only fell silent or got
  stuck. `LIMIT` such deaths without a token in between end the suspect's request. Deaths that were
  shared end nobody, however many there are.
- When a request is ended so, the deaths of which it was suspected are explained, and whoever was
  suspected of nothing else is cleared.
- A death for which no suspect is left was chance. Chance may strike a worker twice while it
  computes an innocent alone; so for each such death since a suspect's first one alone, one more is
  needed to end it. While nothing dies by chance, a request with one choice ends at most three
  workers; further choices, if they reach what is deadly later, may end one more each.
"""

from collections.abc import Collection, Iterable

from pagefleet_scheduler.flights import Accepted, Flight
from pagefleet_scheduler.sequence import Request, Sequence

LIMIT = 2
"""Deaths alone, without a token in between, that end a request."""

CERTAIN, DOUBTFUL = 1.0, 0.5
"""How much a death alone counts: if the process ended or failed; if it fell silent or got stuck."""

ALIVE = 0.5
"""Seconds that a worker counts as alive after it was heard: a little more than two beats."""

TEXT = f"The workers that computed this request alone ended, {LIMIT} times in a row."


class Quarantine:
    """The deaths of workers that are not explained yet, and the suspects of each."""

    def __init__(self) -> None:
        self.suspected = 0
        """Sequences that became suspects."""
        self.chance = 0
        """Deaths that no sequence can be blamed for."""
        self._cases: list[dict[Sequence, None]] = []

    def __repr__(self) -> str:
        return f"<Quarantine {len(self._cases)} deaths to explain, {self.chance} by chance>"

    @property
    def active(self) -> bool:
        """Whether anybody is a suspect."""
        return any(suspect.finish is None for case in self._cases for suspect in case)

    def judge(self, flights: Collection[Flight], heard: float, evidence: float) -> list[Request]:
        """Judge by the steps that were under way at a worker that is lost.

        Args:
            flights: the steps.
            heard: when the worker was last heard of.
            evidence: `CERTAIN` or `DOUBTFUL`.

        Returns:
            The requests that are to end.
        """
        self._forget_who_ended()
        rows = [row.sequence for flight in flights for row in flight.rows]
        case = dict.fromkeys(sequence for sequence in rows if sequence.finish is None)
        if not case:
            self.chance += evidence == CERTAIN
            return []
        self._cases.append(case)
        if len(rows) == 1 and rows[0].suspicion:
            alive = all(flight.sent - heard <= ALIVE for flight in flights)
            return self._died_alone(rows[0], evidence if alive else 0.0)
        for sequence in case:
            self.suspected += not sequence.suspicion
            sequence.suspicion = 2 if sequence.proven and sequence.suspicion != 1 else 1
        return []

    def _died_alone(self, suspect: Sequence, evidence: float) -> list[Request]:
        if not suspect.crashes:
            suspect.excused = self.chance
        suspect.crashes += evidence
        if suspect.crashes < LIMIT + self.chance - suspect.excused:
            return []
        explained = [case for case in self._cases if suspect in case]
        self._cases = [case for case in self._cases if suspect not in case]
        for other in {other: None for case in explained for other in case}:
            if not any(other in case for case in self._cases):
                other.suspicion, other.crashes = 0, 0.0
        return [suspect.request]

    def acquit(self, accepted: Accepted) -> None:
        """Clear all sequences to which a step gave something."""
        if not self._cases:
            return
        for sampled in accepted.sampled:
            self._clear(sampled.sequence)
        for sequence in accepted.completed:
            self._clear(sequence)

    def _clear(self, sequence: Sequence) -> None:
        if not sequence.suspicion:
            return
        sequence.suspicion, sequence.crashes = 0, 0.0
        for case in self._cases:
            case.pop(sequence, None)
        unexplained = [case for case in self._cases if case]
        self.chance += len(self._cases) - len(unexplained)
        self._cases = unexplained

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert the invariant, given all unfinished sequences: suspects are those with a case."""
        suspects = {each for case in self._cases for each in case if each.finish is None}
        assert suspects == {each for each in sequences if each.suspicion}

    def _forget_who_ended(self) -> None:
        """Drop suspects that have ended otherwise, and cases without any: they stay unexplained."""
        cases = ({each: None for each in case if each.finish is None} for case in self._cases)
        self._cases = [case for case in cases if case]


def turns(
    running: list[Sequence], flights: Collection[Flight], step: int, trial: bool
) -> list[list[Sequence]]:
    """Groups of sequences that may have the next step, which goes to the first that gives a row.

    Args:
        running: at the worker, oldest first.
        flights: its steps under way.
        step: the number of the next one.
        trial: whether suspects may run at this worker now.
    """
    suspects = [sequence for sequence in running if sequence.suspicion]
    if not suspects:
        return [running.copy()]
    if is_trial(flights):
        return []
    others = [sequence for sequence in running if not sequence.suspicion]
    if not trial:
        return [others]
    suspects.sort(key=lambda each: (-each.crashes, each.suspicion))
    alone = [[sequence] for sequence in suspects]
    if step % 2:
        return [] if flights else [*alone, others]
    return [others] if flights else [others, *alone]


def is_trial(flights: Iterable[Flight]) -> bool:
    """Whether a suspect runs in one of these steps."""
    return any(row.sequence.suspicion for flight in flights for row in flight.rows)
