"""The paper's setting: how much fits on its GPU, and which requests arrive when (section 6.1)."""

import random
from dataclasses import dataclass

from benchmarks.loadgen.lengths import Drawn, Lengths, LengthSource, Lognormal

ARENA = 15_728
"""Token slots beside OPT-13B on an A100 of 40 GB: 12 GiB of 819,200 bytes each."""

LONGEST = 2_048
"""Tokens that a request may have, prompt and output together: all that OPT knows positions for."""

SHAREGPT = Drawn(Lognormal(161.31, 1.3), Lognormal(337.99, 0.9))
"""Lognormal lengths with the means of the paper's ShareGPT sample (figure 11)."""

ALPACA = Drawn(Lognormal(19.31, 1.3), Lognormal(58.45, 0.9))
"""Lognormal lengths with the means of the paper's Alpaca sample (figure 11)."""

ALPACA_NARROW = Drawn(Lognormal(19.31, 0.6), Lognormal(58.45, 0.9))
"""The same with instructions that are more alike: how many blocks of so short a prompt are full
depends on it."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request: when it comes (seconds), its prompt, and how much it generates (tokens)."""

    number: int
    arrives: float
    prompt: int
    output: int

    @property
    def length(self) -> int:
        """Tokens in the end."""
        return self.prompt + self.output


def poisson(lengths: LengthSource, rate: float, seconds: float, seed: int) -> list[Job]:
    """Requests that come at random, `rate` a second, for `seconds`."""
    rng = random.Random(seed)
    jobs = []
    now = 0.0
    for number, drawn in enumerate(lengths.draw(round(rate * seconds), rng)):
        now += rng.expovariate(rate)
        fitting = fit(drawn)
        jobs.append(Job(number, now, fitting.prompt, fitting.output))
    return jobs


def fit(lengths: Lengths) -> Lengths:
    """The nearest lengths that OPT can serve; the prompt has precedence."""
    prompt = min(max(lengths.prompt, 1), LONGEST - 1)
    return Lengths(prompt, min(max(lengths.output, 1), LONGEST - prompt))
