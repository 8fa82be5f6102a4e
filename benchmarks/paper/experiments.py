"""The paper's experiments as tasks: each is one run with one seed, and can run in any process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.loadgen.lengths import LengthSource
from benchmarks.paper.beams import BeamTape
from benchmarks.paper.capacity import Point, latency_curve
from benchmarks.paper.contiguous import FasterTransformer, Orca, largest, oracle, power_of_two
from benchmarks.paper.paged import Paged
from benchmarks.paper.sharing import beam_search, parallel_sampling
from benchmarks.paper.simulation import Average, Cost, System, simulate
from benchmarks.paper.traffic import poisson
from pagefleet_worker.simulated.costs import Roofline, distserve_opt_13b

SYSTEMS: dict[str, Callable[[], System]] = {
    "FasterTransformer": FasterTransformer,
    "Orca (Max)": lambda: Orca(largest),
    "Orca (Pow2)": lambda: Orca(power_of_two),
    "Orca (Oracle)": lambda: Orca(oracle),
    "paged": Paged,
}

COSTS: dict[str, Cost] = {"roofline": Roofline(), "DistServe": distserve_opt_13b}

LOWEST_RATES = {
    "FasterTransformer": 0.05,
    "Orca (Max)": 0.1,
    "Orca (Pow2)": 0.2,
    "Orca (Oracle)": 0.3,
    "paged": 0.8,
}
"""Requests a second at which each system's latency curve begins: well within what it serves."""


@dataclass(frozen=True)
class Batching:
    """One system at one rate: how full its memory and its batch are (figures 2 and 13)."""

    system: str
    traffic: str
    lengths: LengthSource
    rate: float
    minutes: float
    seed: int

    def run(self) -> tuple[Average, Average]:
        """Averages over all the time, and over that in which requests waited."""
        jobs = poisson(self.lengths, self.rate, 60 * self.minutes, self.seed)
        measures = simulate(SYSTEMS[self.system](), jobs, COSTS["roofline"], drain=False)
        return measures.overall, measures.full


@dataclass(frozen=True)
class Serving:
    """One system at rising rates: its latency (figure 12)."""

    system: str
    lengths: LengthSource
    cost: str
    minutes: float
    seed: int

    def run(self) -> list[Point]:
        """The latency curve."""
        return latency_curve(
            SYSTEMS[self.system],
            self.lengths,
            COSTS[self.cost],
            60 * self.minutes,
            self.seed,
            LOWEST_RATES[self.system],
        )


@dataclass(frozen=True)
class Sharing:
    """Requests that share blocks within themselves (figure 15): `ways` samples, or beams."""

    kind: str
    traffic: str
    lengths: LengthSource
    rate: float
    """Of sequences: requests come `ways` times more slowly."""
    requests: int
    ways: int
    seed: int

    def run(self) -> float:
        """The share of blocks that sharing saves."""
        rate = self.rate / self.ways
        jobs = poisson(self.lengths, rate, self.requests / rate, self.seed)
        if self.kind == "beams":
            return beam_search(jobs, COSTS["roofline"], self.ways, BeamTape.read())
        return parallel_sampling(jobs, COSTS["roofline"], self.ways)


Task: TypeAlias = Batching | Serving | Sharing
