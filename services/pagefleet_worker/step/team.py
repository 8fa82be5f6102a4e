"""How many threads compute a step on a CPU, found out while serving.

A step of few tokens reads all weights and computes little with them. One core may read them nearly
as fast as two, and the second thread then only keeps a core from the gateway and the scheduler, and
waits at barriers while they have it. What a thread gains depends on the machine, the model, the
batch and the neighbours of the moment, so it is tried: now and then a few steps run on half or
twice as many threads, and what was faster is kept (hill climbing). Trials that were lost make the
next ones rarer. The more tokens a step has, the more there is to compute for each weight that is
read, and the more a thread gains: a trial of fewer that was lost stands for those of larger steps,
of which one would keep streams waiting for a second.

The number of threads never changes a result (see `pagefleet_kernels.cpu_launch`).
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagefleet.size_class import size_class

_TRIAL_STEPS = 4
"""Steps on either number of threads whose medians are compared."""

_PATIENCE = 16, 1024
"""Steps from one trial to the next, at least and at most."""

_HOPELESS = 1.4
"""A trial of fewer threads ends when its first step takes so many times as long: where products are
what costs, each would take twice as long.
"""

_WORTH = 0.05
"""Share of a step's time that the larger number of threads has to save."""


class Climb:
    """The search among numbers of threads for steps of about one size."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._settled = most
        self._trial: int | None = None
        self._upwards = False
        self._patience = self._left = _PATIENCE[0]
        self._seconds: list[float] = []
        """Of the last steps; in a trial, of those just before it and those of it."""

    @property
    def threads(self) -> int:
        """For the next step."""
        return self._trial or self._settled

    def took(self, seconds: float) -> bool:
        """A step on `threads` threads is done; whether it ended a trial."""
        self._seconds.append(seconds)
        if self._trial is not None:
            if len(self._seconds) == 2 * _TRIAL_STEPS or self._hopeless(self._trial):
                self._judge(self._trial)
            return self._trial is None
        self._seconds = self._seconds[-_TRIAL_STEPS:]
        self._left -= 1
        if self._left <= 0 and self._most > 1:
            self._trial = self._neighbour()
        return False

    def _neighbour(self) -> int:
        """Half or twice as many threads, in turns as far as there are both."""
        self._upwards = self._settled < self._most and (self._settled == 1 or not self._upwards)
        return min(self._settled * 2, self._most) if self._upwards else self._settled // 2

    def _hopeless(self, trial: int) -> bool:
        fastest = min(self._seconds[_TRIAL_STEPS:])
        return trial < self._settled and fastest > _HOPELESS * self._before

    @property
    def _before(self) -> float:
        """Median seconds of a step just before the trial."""
        return statistics.median(self._seconds[:_TRIAL_STEPS])

    def _judge(self, trial: int) -> None:
        before = self._before
        after = statistics.median(self._seconds[_TRIAL_STEPS:])
        fewer, more = (before, after) if trial > self._settled else (after, before)
        if (more < (1 - _WORTH) * fewer) == (trial > self._settled):
            self._settled, self._patience = trial, _PATIENCE[0]
        else:
            self._patience = min(2 * self._patience, _PATIENCE[1])
        self._trial, self._left, self._seconds = None, self._patience, []

    @property
    def lost_with_fewer(self) -> int:
        """Steps that are to pass before fewer threads are tried again; 0 if they did not lose."""
        return (
            self._patience if self._settled == self._most and self._patience > _PATIENCE[0] else 0
        )

    def put_off(self, steps: int) -> None:
        """Begin no trial of fewer threads within so many steps."""
        if self._settled == self._most:
            self._left = max(self._left, steps)


class Team:
    """The threads that compute steps."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._climbs: dict[int, Climb] = {}

    @contextmanager
    def at_work(self, tokens: int) -> Iterator[None]:
        """Computes a step of so many tokens."""
        torch.set_num_threads(self.threads(tokens))
        began = time.perf_counter()
        yield
        self.took(tokens, time.perf_counter() - began)

    def threads(self, tokens: int) -> int:
        """For the next step of so many tokens."""
        size = size_class(tokens)
        if size not in self._climbs:
            climb = self._climbs[size] = Climb(self._most)
            smaller = (each for known, each in self._climbs.items() if known < size)
            climb.put_off(max((each.lost_with_fewer for each in smaller), default=0))
        return self._climbs[size].threads

    def took(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens on `threads` threads is done."""
        size = size_class(tokens)
        if self._climbs[size].took(seconds):
            lost = self._climbs[size].lost_with_fewer
            for larger in (each for known, each in self._climbs.items() if known > size):
                larger.put_off(lost)
