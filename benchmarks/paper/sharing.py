"""How much memory sharing saves: parallel sampling and beam search (the paper's section 6.3).

The saving is the number of blocks that sharing avoids, over the number without any sharing: one
minus held blocks over entries of all block tables, summed over all steps.
"""

from collections.abc import Callable, Sequence

from benchmarks.paper.beams import BeamReplay, BeamTape
from benchmarks.paper.paged import Paged
from benchmarks.paper.simulation import Cost, Share, simulate
from benchmarks.paper.traffic import Job
from pagefleet.params import SamplingParams


class Counted(Paged):
    """Counts, at every step, the blocks that are held and those that tables refer to."""

    held = 0
    referred = 0

    def begin(self, now: float) -> Sequence[Share]:
        """Begin the next step; empty if there is nothing to do."""
        shares = super().begin(now)
        if shares:
            self.held += self.planner.cache.pool.held
            self.referred += sum(len(stream.table) for stream in self.planner.running)
        return shares

    @property
    def saving(self) -> float:
        """Share of the blocks that sharing saved."""
        return 1 - self.held / self.referred


def parallel_sampling(jobs: Sequence[Job], cost: Cost, samples: int) -> float:
    """The saving where every job asks for so many samples of its length."""
    system = Counted(choices=samples, caching=True)
    simulate(system, jobs, cost, drain=False)
    return system.saving


def beam_search(jobs: Sequence[Job], cost: Cost, width: int, tape: BeamTape) -> float:
    """The saving where every job is a beam search that goes like one of the tape's."""
    system = Counted(_beams(width), candidates=BeamReplay(tape), caching=True)
    simulate(system, jobs, cost, drain=False)
    return system.saving


def _beams(width: int) -> Callable[[Job], SamplingParams]:
    return lambda job: SamplingParams(max_tokens=job.output, seed=0, beam_width=width)
