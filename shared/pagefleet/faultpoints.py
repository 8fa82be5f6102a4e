"""Fault points: named places in the code where a test can make things go wrong.

They are off unless the environment variable `PAGEFLEET_FAULTS` holds a schedule when the process
starts; each rule that strikes is logged, for the test to see. A schedule is

    POINT:ACTION[=ARGUMENT][@NUMBER | %SHARE] ; ... [; seed=NUMBER]

`worker.step:sleep=5@10` sleeps for 5 s when the tenth step begins; `peer.send:drop%0.01` drops one
message in a hundred, the same ones with the same seed. A rule without a number or a share strikes
every time.

| action | what happens at the point |
| --- | --- |
| raise | `InjectedFault` |
| sleep=S | the thread sleeps for S seconds |
| exit=N | the process ends at once, with status N |
| drop, repeat | a message is not sent, or is sent twice |
| corrupt | one byte of a message, or the value that is computed there, becomes wrong |
"""

import logging
import os
import random
import re
import time
from dataclasses import dataclass, field

from pagefleet import writer
from pagefleet.command_line import refuse

VARIABLE = "PAGEFLEET_FAULTS"

log = logging.getLogger(__name__)

_RULE = re.compile(
    r"(?P<point>[\w.]+):(?P<action>raise|sleep|exit|drop|repeat|corrupt)"
    r"(?:=(?P<argument>\d*\.?\d+))?(?:@(?P<number>\d+)|%(?P<share>\d*\.?\d+))?"
)


class InjectedFault(Exception):
    """What the action `raise` raises."""


class ScheduleError(ValueError):
    """A schedule that cannot be read; says what is wrong with it."""


@dataclass(slots=True)
class Rule:
    """What goes wrong at a point, and when."""

    action: str
    argument: float
    number: int | None
    """The only pass at which it strikes, counted from 1."""
    share: float
    """Without a number: the probability of striking, at each pass."""
    passes: int = 0

    def strikes(self, draw: random.Random) -> bool:
        """Count a pass; returns whether something goes wrong at it."""
        self.passes += 1
        if self.number is not None:
            return self.passes == self.number
        return self.share >= 1 or draw.random() < self.share


@dataclass(slots=True)
class Schedule:
    """All rules, by point.

    Raises:
        ScheduleError: the text is no schedule.
    """

    text: str = ""
    rules: dict[str, list[Rule]] = field(default_factory=dict)
    _draw: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        """Read the text."""
        for part in filter(None, map(str.strip, self.text.split(";"))):
            if part.startswith("seed="):
                self._draw.seed(part)
                continue
            match = _RULE.fullmatch(part)
            if match is None:
                raise ScheduleError(
                    f"{part!r} is no rule; write for example worker.step:sleep=5@10"
                )
            rule = Rule(
                match["action"],
                float(match["argument"] or 0),
                None if match["number"] is None else int(match["number"]),
                float(match["share"] or 1),
            )
            self.rules.setdefault(match["point"], []).append(rule)

    def reach(self, point: str) -> None:
        """Pass a point where only time and the flow of control can go wrong.

        Raises:
            InjectedFault: a rule says so.
        """
        for _ in self._struck(point):
            pass

    def corrupts(self, point: str) -> bool:
        """Pass a point where a value is computed; returns whether to make it wrong.

        Raises:
            InjectedFault: a rule says so.
        """
        return any(rule.action == "corrupt" for rule in self._struck(point))

    def passing(self, point: str, frame: bytes) -> list[bytes]:
        """Pass a point where a message is sent; returns the frames to send.

        Raises:
            InjectedFault: a rule says so.
        """
        frames = [frame]
        for rule in self._struck(point):
            match rule.action:
                case "drop":
                    frames = []
                case "repeat":
                    frames = frames * 2
                case "corrupt":
                    frames = [self._corrupted(each) for each in frames]
        return frames

    def _struck(self, point: str) -> list[Rule]:
        struck = [rule for rule in self.rules.get(point, ()) if rule.strikes(self._draw)]
        for rule in struck:
            log.warning("fault point %s: %s at pass %d", point, rule.action, rule.passes)
            match rule.action:
                case "sleep":
                    time.sleep(rule.argument)
                case "exit":
                    writer.flush()
                    os._exit(int(rule.argument))
                case "raise":
                    raise InjectedFault(f"the schedule of {VARIABLE} says so at {point}")
        return struck

    def _corrupted(self, frame: bytes) -> bytes:
        if not frame:
            return frame
        at = self._draw.randrange(len(frame))
        return frame[:at] + bytes([frame[at] ^ self._draw.randrange(1, 256)]) + frame[at + 1 :]


def _of_environment() -> Schedule:
    try:
        return Schedule(os.environ.get(VARIABLE, ""))
    except ScheduleError as error:
        refuse(VARIABLE, error)


_schedule = _of_environment()


def reach(point: str) -> None:
    """`Schedule.reach` of this process's schedule."""
    if _schedule.rules:
        _schedule.reach(point)


def corrupts(point: str) -> bool:
    """`Schedule.corrupts` of this process's schedule."""
    return bool(_schedule.rules) and _schedule.corrupts(point)


def passing(point: str, frame: bytes) -> list[bytes]:
    """`Schedule.passing` of this process's schedule."""
    return _schedule.passing(point, frame) if _schedule.rules else [frame]
