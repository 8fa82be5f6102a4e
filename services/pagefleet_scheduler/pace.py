"""When to order a worker's next step: late, but before the worker runs out of work.

A step that is ordered while another is under way begins without a pause; but whoever arrives after
the order has to wait for the step after that. So the best moment is just before the worker needs
it. How long a step takes is known from earlier ones of about its size. The shortest of the last few
counts, because an order that is too early costs less than one that is too late. How much longer
larger steps take also tells what drafts cost (`speculation`), and how much of a prompt fits a step.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from math import inf
from statistics import median

from pagefleet.size_class import size_class
from pagefleet_scheduler.flights import Flight

EARLY = 0.25
"""How long before a step's end the next is ordered, as a share of the step."""

EARLY_AT_LEAST = 0.004
"""The same in seconds, at least: an order has to be made, sent and read."""

PROMPT_SECONDS = 1.0
"""Seconds that a step may take for prompts: whoever arrives meanwhile waits for its end. Small
models on a fast machine reach the step's limit of tokens first, large ones this."""

SECONDS_BESIDE = 0.15
"""The same beside sequences that decode, which get no token until the step ends."""

SHARE_BESIDE = 1 / 3
"""Share of the waiting prompt tokens that a step beside decoding sequences may have even if that
takes longer. Every step also decodes, so that many small ones would delay the last prompt of a
crowd."""

LEAST_OF_PROMPTS = 64
"""Tokens of prompts that a step may have however long they take: fewer take hardly less. A worker's
first steps have no more, and show how long they take."""

_REMEMBERED = 4
"""Steps of each size that are remembered."""

_REMEMBERED_PROMPTS = 8
"""Steps that computed a part of a prompt, the same."""

_FRESH = 512
"""Steps after which what was learnt about a size counts only if nothing newer is known."""


@dataclass(slots=True)
class _Size:
    """What is known about steps of about one size."""

    steps: "deque[tuple[float, int]]" = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Seconds and tokens of each."""
    latest: int = 0
    """Number of the latest one."""


class Pace:
    """How fast one worker computes, judged by when its results come."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, bool], _Size] = {}
        """By size class, and whether there is a sample for each token."""
        self._prompts: deque[float] = deque(maxlen=_REMEMBERED_PROMPTS)
        """Seconds per token of the latest steps that computed prompts."""
        self._count = 0
        self._landed = 0.0

    def landed(self, flight: Flight, now: float) -> None:
        """The result of the oldest step under way has come."""
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
        """Seconds that a step takes which samples so many tokens; 0 if there was no step yet.

        Interpolated between two known sizes, and in proportion beyond the largest. Beyond all steps
        that sample for each token, those that sample for fewer count, though they are faster.
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
        """Tokens of prompts, of those `waiting`, that the next step may have.

        `beside`: there are sequences that decode.
        """
        fitting = self._tokens_within(PROMPT_SECONDS)
        if beside:
            fitting = min(fitting, max(self._tokens_within(SECONDS_BESIDE), waiting * SHARE_BESIDE))
        return int(min(max(fitting, LEAST_OF_PROMPTS), waiting))

    def excuse(self, seconds: float) -> None:
        """Discount a time in which nothing could be heard."""
        self._landed += seconds

    def _tokens_within(self, seconds: float) -> float:
        """Tokens of prompts that take such a time, at the median speed of the latest steps.

        0 while no prompt was computed, so that the first steps are small: a large model on a CPU
        would be silent for a minute in its first prompt.
        """
        if not self._prompts:
            return 0.0
        usual = median(self._prompts)
        return seconds / usual if usual else inf

    def _began(self, flight: Flight) -> float:
        return max(self._landed, flight.sent)

    def _known(self, since: int) -> list[tuple[int, float]]:
        """Tokens and seconds of the quickest step of each size, of sizes seen since that step."""
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
