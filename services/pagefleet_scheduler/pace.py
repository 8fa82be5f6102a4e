"""When a worker is ordered its next step: late, but before it has nothing to do.

A step that is ordered while another is under way begins without a pause, but who comes after the
order has to wait for the step after that. So the best moment is just before the worker needs it.
How long a step takes is known from those of about its size; the shortest of the last few counts,
because an order that is too early costs less than one that is too late.
"""

from collections import deque

from pagefleet.size_class import size_class
from pagefleet_scheduler.flights import Flight

EARLY = 0.25
"""Share of a step by which the next is ordered before its end."""

EARLY_AT_LEAST = 0.004
"""Seconds of that at least: an order has to be made, sent and read."""

_REMEMBERED = 4
"""Steps of each size."""


class Pace:
    """How fast one worker computes, told from when its results come."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._landed = 0.0

    def landed(self, flight: Flight, now: float) -> None:
        """The result of the oldest step under way is there."""
        if not flight.repeated:
            seconds = self._seconds.setdefault(_size(flight), deque(maxlen=_REMEMBERED))
            seconds.append(now - self._began(flight))
        self._landed = now

    def due(self, flight: Flight) -> float:
        """When to order the step after `flight`, which is the only one under way."""
        seconds = min(self._seconds.get(_size(flight), (0.0,)))
        return self._began(flight) + seconds - max(EARLY * seconds, EARLY_AT_LEAST)

    def excuse(self, seconds: float) -> None:
        """For so long nothing could be heard."""
        self._landed += seconds

    def _began(self, flight: Flight) -> float:
        return max(self._landed, flight.sent)


def _size(flight: Flight) -> int:
    return size_class(len(flight.plan.tokens))
