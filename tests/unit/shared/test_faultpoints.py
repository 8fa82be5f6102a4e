import os
import random
import subprocess
import sys
import time

import pytest

from pagefleet import faultpoints
from pagefleet.faultpoints import VARIABLE, InjectedFault, Schedule, ScheduleError


def test_a_process_without_a_schedule_passes_every_point():
    faultpoints.reach("worker.step")
    assert faultpoints.passing("peer.send", b"frame") == [b"frame"]
    assert not faultpoints.corrupts("echo.logits")


def test_a_numbered_rule_strikes_at_its_pass_only(caplog):
    number = random.randint(1, 9)
    schedule = Schedule(f"worker.step:raise@{number}")
    for passed in range(1, 12):
        schedule.reach("worker.other")
        if passed == number:
            with pytest.raises(InjectedFault, match=r"worker\.step"):
                schedule.reach("worker.step")
        else:
            schedule.reach("worker.step")
    assert caplog.messages == [f"fault point worker.step: raise at pass {number}"]


def test_sleep_takes_its_time():
    began = time.monotonic()
    Schedule("a:sleep=0.05").reach("a")
    assert time.monotonic() - began >= 0.05


def test_messages_are_dropped_repeated_and_corrupted():
    frame = random.randbytes(20)
    schedule = Schedule("a:drop@1;a:repeat@2;a:corrupt@3;a:repeat@4;a:corrupt@4")
    assert schedule.passing("a", frame) == []
    assert schedule.passing("a", frame) == [frame, frame]
    for wrong in [*schedule.passing("a", frame), *schedule.passing("a", frame)]:
        assert sum(old != new for old, new in zip(frame, wrong, strict=True)) == 1
    assert schedule.passing("a", frame) == [frame]


def test_a_share_is_drawn_alike_from_the_same_seed():
    seed = random.randrange(2**32)
    first, second, other = (
        [Schedule.passing(schedule, "a", b"x") == [] for _ in range(500)]
        for schedule in (Schedule(f"a:drop%0.2;seed={n}") for n in (seed, seed, seed + 1))
    )
    assert first == second != other
    assert 50 <= sum(first) <= 150


def test_values_are_corrupted_where_the_rule_says():
    schedule = Schedule("a:corrupt@2")
    assert [schedule.corrupts("a") for _ in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a:burn",
        "a:raise@x",
        "a:raise%0.1@3",
        ":raise",
        "a:sleep=1.2.3",
        "a:drop%.",
        "a:exit=5.",
    ],
)
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(ScheduleError, match="is no rule; write for example"):
        Schedule(text)


def test_a_service_with_a_malformed_schedule_does_not_start() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagefleet_scheduler"],
        env=os.environ | {VARIABLE: "nonsense", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = "PAGEFLEET_FAULTS: 'nonsense' is no rule; write for example worker.step:sleep=5@10\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_the_environment_gives_a_process_its_schedule():
    done = subprocess.run(
        [sys.executable, "-c", "from pagefleet import faultpoints; faultpoints.reach('a')"],
        env={**os.environ, "PYTHONPATH": "shared", faultpoints.VARIABLE: "a:exit=7"},
        check=False,
    )
    assert done.returncode == 7
