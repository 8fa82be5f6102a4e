"""What faults did to a load: counts that must be nought, and how long clients waited."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.drill.injuries import Injury
from benchmarks.drill.streams import EXACT, LOST, REFUSED, REPEATED, WRONG, Answer

FOUND_DEAD = "a worker process has ended"
"""What the scheduler logs when the kernel tells it of a death."""

_NOTICED_WITHIN = 2.0


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; NaN of none."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


@dataclass
class Verdict:
    """All that came of a run. Times are of the monotonic clock, in seconds."""

    calm: float
    """When the load began, still without faults."""
    began: float
    """When the faults began."""
    ended: float
    answers: list[Answer]
    injuries: list[Injury]
    lines: list[tuple[float, str]]
    resumed: int
    """Times that a client whose gateway was gone went on by `Last-Event-ID`."""
    reconnects: int
    """Times that it asked from the beginning, since nothing had come yet."""
    blocks: dict[str, int]
    """By state, at the end, idle."""
    descriptors: Counter[str]
    """By service and kind, at the end, idle: more than at the beginning."""
    idle: bool
    """The cell came to rest at the end."""
    verdicts: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        """Judge the answers."""
        self.verdicts = Counter(answer.verdict for answer in self.answers)

    @property
    def failed(self) -> bool:
        """Whether anything was lost, wrong or leaked."""
        exact = self.verdicts[EXACT] == len(self.answers)
        leaked = self.blocks.get("used", 0) + sum(self.descriptors.values())
        return not exact or bool(leaked) or not self.idle

    @property
    def kills(self) -> list[Injury]:
        """Injuries that were deaths."""
        return [injury for injury in self.injuries if injury.stopped is None]

    @property
    def detections(self) -> list[float]:
        """Seconds from a worker's death to the scheduler's word that it knows."""
        found = [when for when, line in self.lines if FOUND_DEAD in line]
        seconds = []
        for injury in self.kills:
            later = [when for when in found if 0 <= when - injury.when < _NOTICED_WITHIN]
            if injury.service == "worker" and later:
                seconds.append(later[0] - injury.when)
        return seconds

    @property
    def recoveries(self) -> list[float]:
        """For each fault, seconds until the last of the streams that were open had gone on."""
        return [
            max(waits)
            for injury in self.injuries
            if (waits := [wait for a in self.answers if (wait := _wait(a, injury.when))])
        ]

    def goodput(self, start: float, end: float) -> float:
        """Tokens a second of streams that were exact."""
        exact = (answer for answer in self.answers if answer.verdict == EXACT)
        tokens = sum(
            self._tokens_a_piece(answer) * sum(start <= when < end for when in answer.times)
            for answer in exact
        )
        return tokens / (end - start)

    def _tokens_a_piece(self, answer: Answer) -> float:
        return sum(map(len, answer.choices.values())) / max(1, len(answer.times))

    def table(self) -> str:
        """As Markdown."""
        calm, rough = self.goodput(self.calm, self.began), self.goodput(self.began, self.ended)
        share = f" ({rough / calm:.0%})" if calm else ""
        gaps = [answer.longest_gap for answer in self.answers if answer.times]
        by_service = Counter(
            (i.service, "kill" if i.stopped is None else "stop") for i in self.injuries
        )
        injured = ", ".join(
            f"{n} {what}s of {who}s" for (who, what), n in sorted(by_service.items())
        )
        leaked = sum(self.descriptors.values())
        rows = [
            ("streams (tokens)", f"{len(self.answers)} ({self._tokens()})"),
            ("minutes of faults", f"{(self.ended - self.began) / 60:.1f}"),
            ("injuries", injured or "none"),
            *((name, str(self.verdicts[name])) for name in (LOST, REPEATED, WRONG, REFUSED)),
            ("resumed, their gateway gone", str(self.resumed)),
            ("asked again, their gateway gone at once", str(self.reconnects)),
            ("blocks held at the end", str(self.blocks.get("used", 0))),
            ("descriptors leaked", f"{leaked} {dict(self.descriptors) if leaked else ''}".rstrip()),
            ("idle and healthy at the end", "yes" if self.idle else "no"),
            ("death of a worker found, p50 / p99 ms", _pair(self.detections, 1000)),
            ("slowest stream goes on after, p50 / p99 s", _pair(self.recoveries, 1)),
            ("longest gap of a stream, p50 / p99 s", _pair(gaps, 1)),
            ("goodput calm / rough, tokens/s", f"{calm:.0f} / {rough:.0f}{share}"),
        ]
        return "\n".join(
            ["| figure | value |", "| --- | ---: |", *(f"| {a} | {b} |" for a, b in rows)]
        )

    def _tokens(self) -> int:
        return sum(len(got) for answer in self.answers for got in answer.choices.values())


def _wait(answer: Answer, moment: float) -> float | None:
    """Seconds from a moment at which a stream was open until its next piece; None: it was not."""
    if not answer.times or not answer.times[0] <= moment < answer.times[-1]:
        return None
    return next(when for when in answer.times if when > moment) - moment


def _pair(values: Sequence[float], factor: float) -> str:
    shown = (quantile(values, share) * factor for share in (0.5, 0.99))
    return " / ".join(f"{value:.0f}" if factor > 1 else f"{value:.2f}" for value in shown)
