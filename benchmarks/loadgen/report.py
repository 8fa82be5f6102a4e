"""Points of a benchmark as a table in Markdown."""

from collections.abc import Sequence
from textwrap import shorten

from benchmarks.loadgen.bench import Point
from benchmarks.loadgen.metrics import count_failures

COLUMNS = (
    *("load", "seed", "ok", "failed", "requests/s", "output tokens/s"),
    *("TTFT p50 ms", "p99", "ITL p50 ms", "p99", "normalized s/token"),
    *("tokens in", "out", "cached", "tokens/chunk", "generator CPU"),
)


def table(points: Sequence[Point]) -> str:
    """A line for each point."""
    rows = [list(COLUMNS), *map(_cells, points)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join(
        f"| {' | '.join(c.rjust(w) for c, w in zip(cells, widths, strict=True))} |"
        for cells in rows
    )


def failures(points: Sequence[Point]) -> str:
    """A line for each kind of failure of a point, with one of its messages."""
    return "".join(
        f"{point.load}, seed {point.seed}{phase}: {count} x {kind}, for example: "
        f"{shorten(message, 200)}\n"
        for point in points
        for phase, outcomes in ((", warm-up", point.warmup), ("", point.outcomes))
        for kind, count, message in count_failures(outcomes)
    )


def _cells(point: Point) -> list[str]:
    s = point.summary
    latencies = (s.ttft_p50, s.ttft_p99, s.itl_p50, s.itl_p99)
    return [
        *(point.load, str(point.seed), str(s.completed), str(s.failed)),
        *(f"{s.requests_per_second:.2f}", f"{s.output_tokens_per_second:.1f}"),
        *(f"{seconds * 1000:.1f}" for seconds in latencies),
        f"{s.normalized_latency:.4f}",
        *(f"{s.mean_prompt_tokens:.0f}", f"{s.mean_output_tokens:.0f}", f"{s.cached_share:.0%}"),
        *(f"{s.tokens_per_chunk:.2f}", f"{point.generator_cpu:.0%}"),
    ]
