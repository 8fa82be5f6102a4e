"""Which machine and process this is, so that others see its death at once; and how much of the
machine it may use.
"""

import contextlib
import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def host_id() -> str:
    """A name that two processes share exactly if one can watch the other by its pid."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def start_time(pid: int) -> int:
    """When a process started, in kernel ticks since boot: a later one with its pid differs.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    return int(stat.rpartition(b")")[2].split()[19])


def usable_cores() -> int:
    """How many cores this process may use: those it is bound to (sched_setaffinity(2)), or fewer if
    its container has a quota of CPU time.
    """
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    quota = cores_of_quota(_CGROUPS / own.lstrip("/"))
    return math.ceil(min(len(os.sched_getaffinity(0)), quota))


def cores_of_quota(cgroup: Path) -> float:
    """How many cores' time a control group, and those around it, allow a process.

    Infinite without a quota (cgroup v2's `cpu.max`: microseconds, or `max`, per period).
    """
    quotas = [math.inf]
    for folder in (cgroup, *cgroup.parents):
        with contextlib.suppress(OSError):  # the root has no such file, nor has cgroup v1
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                quotas.append(int(quota) / int(period))
    return min(quotas)
