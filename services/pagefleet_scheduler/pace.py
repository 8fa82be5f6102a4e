"""When a worker is ordered its next step: late, but before it has nothing to do.

A step that is ordered while another is under way begins without a pause, but who comes after the
order has to wait for the step after that. So the best moment is just before the worker needs it.
How long a step takes is known from those of about its size; the shortest of the last few counts,
because an order that is too early costs less than one that is too late. How much longer larger
steps take also tells what drafts cost (`speculation`), and how much of a prompt goes into a step.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from math import inf
from statistics import median

from pagefleet.size_class import size_class
from pagefleet_scheduler.flights import Flight

EARLY = 0.25
"""Share of a step by which the next is ordered before its end."""

EARLY_AT_LEAST = 0.004
"""Seconds of that at least: an order has to be made, sent and read."""

PROMPT_SECONDS = 1.0
"""That a step may take for prompts: for so long, whoever comes waits. Small models on a fast
machine are limited by tokens, large ones by this."""

SECONDS_BESIDE = 0.15
"""The same beside sequences that decode: for so long they get nothing."""

SHARE_BESIDE = 1 / 3
"""Of all prompts that wait, which a step beside them may compute even if that takes longer: each
step has a token for all that decode, so that many small ones would delay the last prompt of a
crowd."""

LEAST_OF_PROMPTS = 64
"""Tokens of prompts that a step may have however long they take: few cost as much as these. The
first steps of a worker have no more, by which it is found out how long they take."""

_REMEMBERED = 4
"""Steps of each size."""

_REMEMBERED_PROMPTS = 8
"""Steps that computed some of a prompt."""

_FRESH = 512
"""Steps after which what was learnt of a size is asked only if nothing newer is known."""


@dataclass(slots=True)
class _Size:
    """What is known of steps of about one size."""

    steps: "deque[tuple[float, int]]" = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Seconds, and tokens."""
    latest: int = 0
    """Number of the latest step."""


class Pace:
    """How fast one worker computes, told from when its results come."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, bool], _Size] = {}
        """By class of size, and whether there is a sample for each token."""
        self._prompts: deque[float] = deque(maxlen=_REMEMBERED_PROMPTS)
        """Seconds a token of the latest steps that computed prompts."""
        self._count = 0
        self._landed = 0.0

    def landed(self, flight: Flight, now: float) -> None:
        """The result of the oldest step under way is there."""
        if not flight.repeated:
            self._count += 1
            seconds = now - self._began(flight)
            size = self._sizes.setdefault(_key(flight), _Size())
            size.steps.append((seconds, flight.tokens))
            size.latest = self._count
            if not flight.samples_all:
                self._prompts.append(seconds / flight.tokens)
        self._landed = now

    def due(self, flight: Flight) -> float:
        """When to order the step after `flight`, which is the only one under way."""
        size = self._sizes.get(_key(flight))
        seconds = min(size.steps)[0] if size else 0.0
        return self._began(flight) + seconds - max(EARLY * seconds, EARLY_AT_LEAST)

    def seconds(self, tokens: int) -> float:
        """Seconds that a step takes which samples so many tokens; 0 if there was no step.

        Between two sizes it is told from both; beyond the largest it is in proportion. Where no
        step was so large, those count that sample less than they are fed, which are faster.
        """
        known = self._known(self._count - _FRESH)
        if not known or known[-1][0] < tokens:
            known = self._known(0)
        at = bisect_right(known, (tokens, inf))
        if not known:
            return 0.0
        if at == 0:
            return known[0][1]
        below, seconds = known[at - 1]
        if at == len(known):
            return seconds * tokens / below
        above, longer = known[at]
        return seconds + (longer - seconds) * (tokens - below) / (above - below)

    def most_of_prompts(self, waiting: int, beside: bool) -> int:
        """Tokens of prompts, of those `waiting`, that the next step is to have at most.

        `beside`: there are sequences that decode.
        """
        fitting = self._tokens_within(PROMPT_SECONDS)
        if beside:
            fitting = min(fitting, max(self._tokens_within(SECONDS_BESIDE), waiting * SHARE_BESIDE))
        return int(min(max(fitting, LEAST_OF_PROMPTS), waiting))

    def excuse(self, seconds: float) -> None:
        """For so long nothing could be heard."""
        self._landed += seconds

    def _tokens_within(self, seconds: float) -> float:
        """Tokens of prompts that are computed in such a time, as in the latest steps at the median.

        0 while none was computed, so that the first steps are small: a large model on a CPU would
        be gone for a minute in its first prompt.
        """
        if not self._prompts:
            return 0.0
        usual = median(self._prompts)
        return seconds / usual if usual else inf

    def _began(self, flight: Flight) -> float:
        return max(self._landed, flight.sent)

    def _known(self, since: int) -> list[tuple[int, float]]:
        """Tokens and seconds of the quickest step of each size that there was since a step."""
        sampled: list[tuple[int, float]] = []
        others: list[tuple[int, float]] = []
        for (_, samples_all), size in self._sizes.items():
            if size.latest >= since:
                seconds, tokens = min(size.steps)
                (sampled if samples_all else others).append((tokens, seconds))
        largest = max(sampled, default=(0, 0.0))[0]
        return sorted(sampled + [each for each in others if each[0] > largest])


def _key(flight: Flight) -> tuple[int, bool]:
    return size_class(flight.tokens), flight.samples_all
