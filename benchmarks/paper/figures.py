"""The paper's own figures, and what a reproduction of them has to reach.

What the text states is exact; what was read off a plot by others is marked `~` in tables.
"""

from statistics import mean
from typing import NamedTuple

from benchmarks.paper.outcome import Outcome

TOKEN_SHARES = {"Orca (Max)": 20.4, "Orca (Pow2)": 26.8, "Orca (Oracle)": 38.2, "paged": 96.3}
"""Figure 2: percent of the slots that hold tokens (read off)."""

BATCHES = {
    "ShareGPT": {"Orca (Max)": 7.0, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, "paged": 30.42},
    "Alpaca": {"Orca (Max)": 7.0, "Orca (Pow2)": 43.24, "Orca (Oracle)": 72.75, "paged": 132.44},
}
"""Figure 13: mean number of batched requests at 2 and at 30 requests a second (read off)."""

SAVINGS = {
    ("samples", "ShareGPT"): {2: 16.2, 6: 30.5},
    ("samples", "Alpaca"): {2: 6.09, 4: 8.53, 6: 9.79},
    ("beams", "ShareGPT"): {2: 44.3, 6: 66.3},
    ("beams", "Alpaca"): {2: 37.56, 4: 53.13, 6: 55.16},
}
"""Section 6.3 and figure 15: percent of the blocks that sharing saves. Of ShareGPT the text has the
range only."""


class Check(NamedTuple):
    """Something that a reproduction must reach."""

    name: str
    measured: str
    wanted: str
    reached: bool


def checks(outcome: Outcome) -> list[Check]:
    """Everything that was measured and is to be reached; means of the seeds count."""
    found = [*_batching(outcome), *_capacity(outcome)]
    for (kind, traffic), savings in SAVINGS.items():
        if kind == "samples":
            for ways, wanted in savings.items():
                values = outcome.sharing[kind, traffic, ways]
                found += [_near(f"saved by {ways} samples, {traffic}, %", values, wanted, 1.5)]
    return found


def _batching(outcome: Outcome) -> list[Check]:
    batches = {system: outcome.batch("ShareGPT", system) for system in TOKEN_SHARES}
    tolerances = {"Orca (Pow2)": 6.0}
    found = [
        _near(
            f"slots that hold tokens, {system}, %",
            outcome.shares("ShareGPT", system, "tokens"),
            wanted,
            tolerances.get(system, 2.5),
        )
        for system, wanted in TOKEN_SHARES.items()
    ]
    external = outcome.shares("ShareGPT", "Orca (Max)", "external")
    paged = outcome.shares("ShareGPT", "paged", "tokens")
    full = outcome.full_batch("ShareGPT", "Orca (Max)")
    return [
        _near("batch of Orca (Max) while requests wait", full, 7.0, 0.0),
        _near("external waste of Orca (Max), %", external, 8.85, 0.01),
        *found,
        _at_least("slots that hold tokens, paged, %", mean(paged), 96.0),
        *(
            _at_least(f"batch, paged / {system}", mean(batches["paged"]) / mean(batches[system]), n)
            for system, n in (("Orca (Oracle)", 2.0), ("Orca (Max)", 4.0))
        ),
    ]


def _capacity(outcome: Outcome) -> list[Check]:
    return [
        _at_least(
            f"rate at 0.2 s/token, paged / {system}, {cost}",
            mean(outcome.capacities(cost, "paged", 0.2))
            / mean(outcome.capacities(cost, system, 0.2)),
            wanted,
        )
        for cost in outcome.costs
        for system, wanted in (("Orca (Oracle)", 1.5), ("Orca (Max)", 2.4))
    ]


def _near(name: str, values: list[float], wanted: float, tolerance: float) -> Check:
    measured = mean(values)
    reached = abs(measured - wanted) <= tolerance + 1e-9
    return Check(name, f"{measured:.2f}", f"{wanted:g} ± {tolerance:g}", reached)


def _at_least(name: str, measured: float, wanted: float) -> Check:
    return Check(name, f"{measured:.2f}", f"at least {wanted:g}", measured >= wanted)
