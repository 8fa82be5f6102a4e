"""The paper's figures with both sets of numbers, as one picture: `memory.png` and `memory.svg`."""

from pathlib import Path
from statistics import mean

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.paper.capacity import THRESHOLDS
from benchmarks.paper.experiments import SYSTEMS
from benchmarks.paper.figures import SAVINGS, TOKEN_SHARES
from benchmarks.paper.outcome import Outcome
from benchmarks.paper.simulation import Usage

_COLORS = ("#2a6f97", "#a9d6e5", "#f4a259", "#d9d9d9")


def draw(outcome: Outcome, folder: Path) -> None:
    """Write both files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "pagefleet"}):
        figure, (usage, latency, savings) = plt.subplots(
            1, 3, figsize=(17, 4.8), layout="constrained"
        )
        _usage(usage, outcome)
        _latency(latency, outcome)
        _savings(savings, outcome)
        figure.savefig(folder / "memory.png", dpi=110)
        figure.savefig(folder / "memory.svg", metadata={"Date": None})
        plt.close(figure)


def _usage(axes: Axes, outcome: Outcome) -> None:
    names = list(SYSTEMS)
    bottoms = [0.0] * len(names)
    for use, color in zip(Usage._fields, _COLORS, strict=True):
        heights = [mean(outcome.shares("ShareGPT", name, use)) for name in names]
        axes.bar(names, heights, bottom=bottoms, color=color, label=use)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.plot(
        list(TOKEN_SHARES), list(TOKEN_SHARES.values()), "k_", markersize=24, label="tokens, paper"
    )
    axes.set(title="What the slots are used for (ShareGPT)", ylabel="% of slots")
    axes.tick_params(axis="x", labelrotation=20)
    axes.legend(fontsize="small")


def _latency(axes: Axes, outcome: Outcome) -> None:
    for name in SYSTEMS:
        curve = outcome.serving[outcome.costs[0], name][0]
        rates, latencies = [p.rate for p in curve], [p.latency for p in curve]
        axes.plot(rates, latencies, marker="o", markersize=3, label=name)
    axes.set(
        title=f"Latency (ShareGPT, {outcome.costs[0]})",
        xlabel="requests/s",
        ylabel="mean seconds per output token",
        xscale="log",
        ylim=(0, THRESHOLDS[-1]),
    )
    axes.legend(fontsize="small")


def _savings(axes: Axes, outcome: Outcome) -> None:
    names = [f"{ways} {kind}\n{traffic}" for kind, traffic, ways in outcome.sharing]
    axes.barh(names, [mean(values) for values in outcome.sharing.values()], color=_COLORS[0])
    for row, (kind, traffic, ways) in enumerate(outcome.sharing):
        paper = SAVINGS.get((kind, traffic), {}).get(ways)
        if paper is not None:
            axes.plot([paper], [row], "k|", markersize=14)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="x-small")
    axes.set(title="Blocks saved by sharing (bars: measured, marks: paper)", xlabel="%")
