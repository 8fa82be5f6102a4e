"""What was measured beside what the paper says, as tables in Markdown."""

import math
from collections.abc import Iterable, Sequence
from statistics import mean

from benchmarks.paper.capacity import THRESHOLDS, last_within
from benchmarks.paper.experiments import SYSTEMS
from benchmarks.paper.figures import BATCHES, SAVINGS, TOKEN_SHARES, checks
from benchmarks.paper.outcome import Outcome
from benchmarks.paper.simulation import Usage

REFERENCE = 0.2
"""Seconds a token: the rate at which latencies are listed."""


def report(outcome: Outcome) -> str:
    """All tables, each under what it is."""
    sections = [
        ("How the slots are used, ShareGPT at 2 requests/s, % while requests wait", _usage),
        ("Mean number of batched requests", _batches),
        ("Requests a second within a latency, ShareGPT", _capacities),
        (f"Latencies at the last rate below {REFERENCE:g} s/token, seconds, p50 / p99", _latencies),
        ("Blocks saved by sharing, %", _savings),
        ("To be reached", _checks),
    ]
    return "\n\n".join(f"{title}\n\n{make(outcome)}" for title, make in sections)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of equal width: the first column to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    marks = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| "
        + " | ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])
        + " |"
        for cells in (lines[0], marks, *lines[1:])
    )


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The mean of the seeds, and the furthest that one lies from it."""
    middle = mean(values)
    return f"{middle:.{digits}f} ± {max(abs(value - middle) for value in values):.{digits}f}"


def _usage(outcome: Outcome) -> str:
    rows = [
        [
            system,
            *(spread(outcome.shares("ShareGPT", system, use)) for use in Usage._fields),
            f"~{TOKEN_SHARES[system]}" if system in TOKEN_SHARES else "",
        ]
        for system in SYSTEMS
    ]
    return table(["system", *Usage._fields, "tokens, paper"], rows)


def _batches(outcome: Outcome) -> str:
    header = ["system"]
    for traffic in BATCHES:
        header += [traffic, f"{traffic}, paper"]
    rows = []
    for system in SYSTEMS:
        row = [system]
        for traffic, figures in BATCHES.items():
            row.append(spread(outcome.batch(traffic, system), 2))
            row.append(f"~{figures[system]}" if system in figures else "")
        rows.append(row)
    return table(header, rows)


def _capacities(outcome: Outcome) -> str:
    header = ["cost model, system", *(f"{threshold:g} s/token" for threshold in THRESHOLDS)]
    rows = [
        [f"{cost}, {system}", *(spread(outcome.capacities(cost, system, t), 2) for t in THRESHOLDS)]
        for cost in outcome.costs
        for system in SYSTEMS
    ]
    return table(header, rows)


def _latencies(outcome: Outcome) -> str:
    rows = []
    for (cost, system), curves in outcome.serving.items():
        point = last_within(curves[0], REFERENCE)
        if point is not None:
            figures = [f"{point.rate:.2f}", f"{point.latency:.3f}"]
            pairs = [_pair(*point.first_token), _pair(*point.gap)]
            rows.append([f"{cost}, {system}", *figures, *pairs])
    header = ["cost model, system", "requests/s", "mean s/token", "first token", "between tokens"]
    return table(header, rows)


def _pair(p50: float, p99: float) -> str:
    """Nothing where nothing could be measured: FasterTransformer gives whole answers."""
    return "-" if math.isnan(p50) else f"{p50:.3f} / {p99:.3f}"


def _savings(outcome: Outcome) -> str:
    rows = []
    for (kind, traffic, ways), values in outcome.sharing.items():
        paper = SAVINGS.get((kind, traffic), {}).get(ways)
        name = f"{ways} {kind}, {traffic}"
        rows.append([name, spread(values), "" if paper is None else f"{paper}"])
    return table(["sharing, lengths", "saved", "paper"], rows)


def _checks(outcome: Outcome) -> str:
    rows = [
        [name, measured, wanted, "yes" if reached else "NO"]
        for name, measured, wanted, reached in checks(outcome)
    ]
    return table(["figure", "measured", "wanted", "reached"], rows)
