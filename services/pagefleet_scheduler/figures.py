"""What a scheduler counts over its life, for metrics."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from pagefleet.wire import STEP_BOUNDS, CellStats, Plan
from pagefleet_scheduler.admission import Admission
from pagefleet_scheduler.flights import Accepted
from pagefleet_scheduler.placement import Placement
from pagefleet_scheduler.sequence import Sequence


@dataclass
class Figures:
    """Counters; times are of the scheduler's clock, in seconds."""

    steps: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS) + 1))
    step_tokens: int = 0
    dropped_results: int = 0
    lost_workers: int = 0
    migrations: int = 0
    quarantined: int = 0
    recoveries: int = 0
    recovery_seconds: float = 0.0

    def ordered(self, plan: Plan) -> None:
        """A step is sent to a worker."""
        tokens = len(plan.tokens) // 4
        self.steps[bisect_left(STEP_BOUNDS, tokens)] += 1
        self.step_tokens += tokens

    def lost(self, sequences: Iterable[Sequence], now: float) -> None:
        """A worker was lost, and with it what these sequences had there."""
        self.lost_workers += 1
        for sequence in sequences:
            self.migrations += 1
            sequence.lost = now if sequence.lost is None else sequence.lost

    def accepted(self, accepted: Accepted, now: float) -> None:
        """A step gave sequences tokens, some for the first time since their worker was lost."""
        for sampled in accepted.sampled:
            sequence = sampled.sequence
            if sequence.lost is not None:
                self.recoveries += 1
                self.recovery_seconds += now - sequence.lost
                sequence.lost = None

    def stats(self, placement: Placement, admission: Admission, joins: int) -> CellStats:
        """For a gateway."""
        return CellStats(
            steps=self.steps.copy(),
            step_tokens=self.step_tokens,
            dropped_results=self.dropped_results,
            lost_workers=self.lost_workers,
            migrations=self.migrations,
            quarantined=self.quarantined,
            recoveries=self.recoveries,
            recovery_micros=round(1e6 * self.recovery_seconds),
            class_changes=placement.class_changes,
            suspects=placement.quarantine.suspected,
            moved=admission.moved,
            recalled=admission.recalled,
            joins=joins,
        )
