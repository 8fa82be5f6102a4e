"""A run as a picture: tokens a second, and every fault where it happened."""

from benchmarks.drill.verdict import Verdict

WIDTH, HEIGHT, MARGIN = 1200, 320, 40
_COLOURS = {"worker": "#c0392b", "scheduler": "#8e44ad", "gateway": "#d68910"}


def timeline(verdict: Verdict) -> str:
    """SVG; a fault is a line in its service's colour, dashed for one that was only stopped."""
    length = max(verdict.ended - verdict.calm, 1.0)
    counts = [0.0] * (int(length) + 1)
    for answer in verdict.answers:
        for when in answer.times:
            if verdict.calm <= when < verdict.ended:
                counts[int(when - verdict.calm)] += len(answer.choices)
    highest = max(*counts, 1.0)

    def x(seconds: float) -> float:
        return MARGIN + seconds / length * (WIDTH - 2 * MARGIN)

    def y(count: float) -> float:
        return HEIGHT - MARGIN - count / highest * (HEIGHT - 2 * MARGIN)

    points = " ".join(f"{x(second + 0.5):.1f},{y(n):.1f}" for second, n in enumerate(counts[:-1]))
    faults = "\n".join(
        f'<line x1="{x(i.when - verdict.calm):.1f}" x2="{x(i.when - verdict.calm):.1f}" '
        f'y1="{MARGIN}" y2="{HEIGHT - MARGIN}" stroke="{_COLOURS.get(i.service, "#555")}" '
        f'stroke-dasharray="{"none" if i.stopped is None else "4 3"}"/>'
        for i in verdict.injuries
    )
    legend = "".join(
        f'<text x="{MARGIN + 260 + 110 * n}" y="24" fill="{colour}">{name}</text>'
        for n, (name, colour) in enumerate(_COLOURS.items())
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" \
font-family="sans-serif" font-size="13">
<rect width="100%" height="100%" fill="white"/>
{faults}
<polyline points="{points}" fill="none" stroke="#2471a3" stroke-width="2"/>
<text x="{MARGIN}" y="24">pieces a second, up to {highest:.0f}; killed, or stopped (dashed):</text>
{legend}
<text x="{MARGIN}" y="{HEIGHT - 12}">0 s</text>
<text x="{WIDTH - 2 * MARGIN}" y="{HEIGHT - 12}">{length:.0f} s</text>
</svg>
"""
