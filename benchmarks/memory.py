"""Reproduce the PagedAttention paper's experiments on memory with Pagefleet's own scheduler.

    python -m benchmarks.memory --plots benchmarks/plots

A worker of the paper's size (OPT-13B on an A100 of 40 GB: 15,728 token slots) is simulated under
virtual time: its steps take what a cost model says, everything else is the scheduler that serves.
Beside it run the paper's baselines, with the same traffic and costs. Prompts and outputs have
lognormal lengths with the means of the paper's ShareGPT and Alpaca samples; `--lengths` takes the
former from a file instead. Beams follow searches that SmolLM2-135M-Instruct made
(benchmarks/paper/record_beams.py). The exit status is 1 if a figure is not reached.

`--plots` needs matplotlib: pip install -e '.[plots]'
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.loadgen.lengths import LengthSource, Recorded
from benchmarks.paper.experiments import COSTS, SYSTEMS, Batching, Serving, Sharing, Task
from benchmarks.paper.figures import checks
from benchmarks.paper.outcome import Outcome
from benchmarks.paper.report import report
from benchmarks.paper.traffic import ALPACA, ALPACA_NARROW, SHAREGPT

WAYS = (2, 4, 6)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what `argv` asks for and give the status to exit with."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        sharegpt: LengthSource = Recorded.read(options.lengths) if options.lengths else SHAREGPT
    except (OSError, ValueError) as error:
        parser.error(str(error))
    tasks = [task for seed in options.seeds for task in _tasks(sharegpt, options.minutes, seed)]
    outcome = Outcome()
    with ProcessPoolExecutor(options.jobs) as executor:
        for number, (task, result) in enumerate(zip(tasks, executor.map(run, tasks), strict=True)):
            _take(outcome, task, result)
            print(f"\r{number + 1} of {len(tasks)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(report(outcome))
    if options.plots is not None:
        from benchmarks.paper.plots import draw

        draw(outcome, options.plots)
    return int(not all(check.reached for check in checks(outcome)))


def _tasks(sharegpt: LengthSource, minutes: float, seed: int) -> list[Task]:
    traffics = {
        "ShareGPT": (sharegpt, 2.0, minutes),
        "Alpaca": (ALPACA, 30.0, minutes / 2),
    }
    batching = [
        Batching(system, traffic, lengths, rate, length, seed)
        for traffic, (lengths, rate, length) in traffics.items()
        for system in SYSTEMS
    ]
    serving = [
        Serving(system, sharegpt, cost, minutes, seed) for cost in COSTS for system in SYSTEMS
    ]
    shared = {
        ("samples", "ShareGPT"): (sharegpt, 1.0, 200),
        ("samples", "Alpaca"): (ALPACA, 15.0, 1_000),
        ("samples", "Alpaca, narrow"): (ALPACA_NARROW, 15.0, 1_000),
        ("beams", "ShareGPT"): (sharegpt, 1.0, 100),
        ("beams", "Alpaca"): (ALPACA, 15.0, 500),
    }
    sharing = [
        Sharing(kind, traffic, lengths, rate, requests, ways, seed)
        for (kind, traffic), (lengths, rate, requests) in shared.items()
        for ways in WAYS
    ]
    return [*batching, *serving, *sharing]


def run(task: Task) -> Any:
    """In a process of the pool."""
    return task.run()


def _take(outcome: Outcome, task: Task, result: Any) -> None:
    match task:
        case Batching():
            outcome.batching[task.traffic, task.system].append(result)
        case Serving():
            outcome.serving[task.cost, task.system].append(result)
        case Sharing():
            outcome.sharing[task.kind, task.traffic, task.ways].append(100 * result)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="CSV",
        help="the first request of each conversation in a file (.gz too), for ShareGPT's lengths",
    )
    parser.add_argument(
        "--seeds", type=_numbers, default=[1, 2, 3], metavar="N,N,...", help="1,2,3 by default"
    )
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="of simulated traffic (the paper: 60)"
    )
    parser.add_argument("--jobs", type=int, help="processes that simulate; one a core by default")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw memory.png and .svg")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    raise SystemExit(main())
