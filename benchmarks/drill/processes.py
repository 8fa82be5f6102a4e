"""What Linux tells of a process, and what can be done to it."""

import os
import re
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

_SERVICE = re.compile(r"pagefleet_(\w+)")


def children(pid: int) -> dict[int, str]:
    """The services among the children of a launcher: the name of each by its pid."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            command = Path(f"/proc/{child}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if match := _SERVICE.search(command):
            found[int(child)] = match[1]
    return found


def descriptors(pid: int) -> Counter[str]:
    """What a process has open, and how many of each: socket, pipe, file, [pidfd] ..."""
    kinds: Counter[str] = Counter()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed by now
            kind, _, what = os.readlink(entry).partition(":")
            kinds[what if kind == "anon_inode" else kind if what else "file"] += 1
    return kinds


def state(pid: int) -> str:
    """One letter of proc(5): R, S, T (stopped), Z (dead)...; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether it is there and not only waits to be reaped."""
    return state(pid) not in ("", "Z", "X")


def kill(pid: int) -> bool:
    """SIGKILL; whether there was anything to kill."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
