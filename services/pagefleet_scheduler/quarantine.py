"""Quarantine: finding the request that ends workers, and sparing all others.

Some inputs crash whatever computes them. The scheduler cannot see why a worker died; it knows which
rows were under way. The rules:

- When a worker is lost, the requests whose rows were under way become suspects; but not those to
  which a step of the same run had given a token: a chance death must not slow down whoever ran
  well. (If one of these is to blame, it has no token when it dies again, and is a suspect then.)
- A suspect runs alone: its rows are steps of their own, ordered when nothing else is under way, in
  turn with those of all others. A token acquits it.
- A crash that a suspect shared with nobody counts, if the worker seemed alive when the step was
  ordered. `LIMIT` of them without a token in between end the request. Crashes that were shared end
  nobody, however many there are.
"""

from collections.abc import Collection, Iterable

from pagefleet_scheduler.flights import Accepted, Flight
from pagefleet_scheduler.sequence import Request, Sequence

LIMIT = 2
"""Crashes alone, without a token in between, that end a request."""

ALIVE = 0.5
"""Seconds for which a worker is taken to be alive after it was heard: two beats, and some time."""

TEXT = f"The workers that computed this request alone ended, {LIMIT} times in a row."


def crashed(flights: Collection[Flight], heard: float) -> list[Request]:
    """Judge by the steps that were under way at a worker that is lost.

    Args:
        flights: the steps.
        heard: when the worker was last heard of.

    Returns:
        The requests that are to end.
    """
    rows = [row for flight in flights for row in flight.rows]
    if len(rows) == 1 and rows[0].sequence.request.suspect:
        request = rows[0].sequence.request
        request.crashes += all(flight.sent - heard <= ALIVE for flight in flights)
        return [request] if request.crashes >= LIMIT else []
    for row in rows:
        if not row.sequence.proven:
            row.sequence.request.suspect = True
    return []


def acquit(accepted: Accepted) -> None:
    """Clear all to whom a step gave something."""
    for sampled in accepted.sampled:
        sampled.sequence.proven = sampled.sequence.slot is not None
        _clear(sampled.sequence.request)
    for sequence in accepted.completed:
        _clear(sequence.request)


def _clear(request: Request) -> None:
    request.suspect, request.crashes = False, 0


def turns(running: list[Sequence], flights: Iterable[Flight], step: int) -> "list[list[Sequence]]":
    """Which sequences may be in the step of this number: the first of these that gives a row."""
    suspects = [[sequence] for sequence in running if sequence.request.suspect]
    if not suspects:
        return [running.copy()]
    rows = [row for flight in flights for row in flight.rows]
    if any(row.sequence.request.suspect for row in rows):
        return []
    others = [sequence for sequence in running if not sequence.request.suspect]
    if step % 2:
        return [] if rows else [*suspects, others]
    return [others] if rows else [others, *suspects]
