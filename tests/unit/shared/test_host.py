import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pagefleet.host import cores_of_quota, start_time, usable_cores


@pytest.fixture
def affinity():
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_a_process_may_use_the_cores_that_it_is_bound_to(affinity):
    assert 1 <= usable_cores() <= len(affinity)
    os.sched_setaffinity(0, {min(affinity)})
    assert usable_cores() == 1


def test_without_a_quota_all_cores_are_there(tmp_path):
    assert cores_of_quota(tmp_path / "no" / "such" / "group") == math.inf
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores_of_quota(tmp_path) == math.inf


def test_the_tightest_quota_around_a_process_counts(tmp_path):
    inner = tmp_path / "kubepods" / "pod"
    inner.mkdir(parents=True)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "kubepods" / "cpu.max").write_text("150000 100000\n")
    (inner / "cpu.max").write_text("400000 100000\n")
    assert cores_of_quota(inner) == 1.5
    (inner / "cpu.max").write_text("50000 100000\n")
    assert cores_of_quota(inner) == 0.5


def ticks_since_boot():
    return float(Path("/proc/uptime").read_text().split()[0]) * os.sysconf("SC_CLK_TCK")


def test_when_a_process_started_whatever_its_name(tmp_path):
    program = shutil.copy("/bin/sleep", tmp_path / "a) R (b 1 2")
    before = ticks_since_boot()
    with subprocess.Popen([program, "60"]) as process:
        after, started = ticks_since_boot(), start_time(process.pid)
        process.kill()
    assert before - 2 <= started <= after + 2
    with pytest.raises(ProcessLookupError):
        start_time(process.pid)
