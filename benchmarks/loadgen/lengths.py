"""How long prompts and outputs are: like real traffic.

`Drawn` lengths follow lognormal distributions, whose spread (sigma 1.3 of prompts, 0.9 of outputs)
fits ShareGPT; `Recorded` ones come from a file. A lognormal gives the middle quantile of each of as
many equal strata as there are requests, in random order: independent draws of so wide a
distribution would change the work itself by tens of percent from seed to seed, and hide what the
server did.
"""

import csv
import gzip
import math
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one request: of its prompt and of the output it asks for."""

    prompt: int
    output: int

    def clipped(self, longest: int) -> "Lengths":
        """The nearest lengths from 1 to `longest`."""
        return Lengths(*(min(max(tokens, 1), longest) for tokens in (self.prompt, self.output)))


class LengthSource(Protocol):
    """Where lengths come from."""

    def draw(self, count: int, rng: random.Random) -> list[Lengths]:
        """The lengths of `count` requests."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal distribution by its mean and the standard deviation of its logarithm."""

    mean: float
    sigma: float

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """The middle quantiles of `count` equal strata, rounded, in random order."""
        logarithm = NormalDist(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        quantiles = [(stratum + 0.5) / count for stratum in range(count)]
        rng.shuffle(quantiles)
        return [round(math.exp(logarithm.inv_cdf(quantile))) for quantile in quantiles]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Lengths of prompts and outputs that follow two independent distributions."""

    prompts: Lognormal
    outputs: Lognormal

    def draw(self, count: int, rng: random.Random) -> list[Lengths]:
        """The lengths of `count` requests."""
        prompts, outputs = self.prompts.draw(count, rng), self.outputs.draw(count, rng)
        return [Lengths(p, o) for p, o in zip(prompts, outputs, strict=True)]


WORKLOADS = {
    "chat": Drawn(Lognormal(201.4, 1.3), Lognormal(108.4, 0.9)),
    "instr": Drawn(Lognormal(19.2, 1.3), Lognormal(56.3, 0.9)),
}
"""Clipped to 512 tokens, the means of prompt and output are 150 and 105 for `chat` (ShareGPT's
shape, shortened) and 19 and 56 for `instr` (Alpaca)."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths of real requests, drawn with replacement."""

    known: list[Lengths]

    @classmethod
    def read(cls, path: Path) -> "Recorded":
        """The lengths in a CSV, which may be gzipped (`.gz`).

        The first line names the columns; the last two are the tokens of the prompt and of the
        output. If there is a column `conv`, only the first line of each conversation counts.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no lengths.
        """
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            lines = list(csv.DictReader(file))
        if lines and "conv" in lines[0]:
            lines = list({line["conv"]: line for line in reversed(lines)}.values())
        try:
            known = [Lengths(*map(int, list(line.values())[-2:])) for line in lines]
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"The last two columns of {path} must be tokens of prompt and output: {error}."
            ) from error
        if not known:
            raise ValueError(f"{path} holds no lengths: a line of column names and more must come.")
        return cls(known)

    def draw(self, count: int, rng: random.Random) -> list[Lengths]:
        """The lengths of `count` requests."""
        return rng.choices(self.known, k=count)
