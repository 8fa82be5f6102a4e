"""Which processes are watched by their numbers: those of this machine, while that is possible."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from pagefleet.host import host_id, start_time
from pagefleet.wire import PROTOCOL, WorkerHello
from pagefleet_scheduler.watch import ProcessWatch


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def hello(process: "subprocess.Popen[bytes]") -> WorkerHello:
    where = (host_id(), process.pid, start_time(process.pid))
    return WorkerHello(PROTOCOL, *where, "m", "class", 4, 50, 8, 100, 64, 1000)


def test_one_of_this_machine_is_watched_once(hello: WorkerHello) -> None:
    watch = ProcessWatch()
    pidfd = watch.add(b"w", hello)
    assert pidfd is not None
    assert (watch.of(b"w"), pidfd in watch) == (pidfd, True)
    assert watch.add(b"w", hello) is None
    assert watch.end(pidfd) == b"w"
    assert watch.of(b"w") is None


@pytest.mark.parametrize("other", ["another boot", "another container"])
def test_the_number_of_one_elsewhere_means_nothing_here(hello: WorkerHello, other: str) -> None:
    boot, space = host_id().split("/")
    host = f"{'0' * len(boot)}/{space}" if other == "another boot" else f"{boot}/{int(space) + 1}"
    assert ProcessWatch().add(b"w", replace(hello, host=host)) is None


def test_one_that_has_ended_is_told_from_one_that_cannot_be_watched(
    process: "subprocess.Popen[bytes]", hello: WorkerHello
) -> None:
    """Also if another has its number by now, or its parent has not looked yet."""
    watch, descriptors = ProcessWatch(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProcessLookupError):
        watch.add(b"w", replace(hello, started=hello.started + 1))
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError):
        watch.add(b"w", hello)
    process.wait()
    with pytest.raises(ProcessLookupError):
        watch.add(b"w", hello)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_one_that_cannot_be_looked_at_for_want_of_descriptors_is_not(hello: WorkerHello) -> None:
    """Strangers at a port may have taken them: that must not end the scheduler."""
    watch = ProcessWatch()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    try:
        for spare in (0, 1):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, limits[1]))
            assert watch.add(b"w", hello) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    left = os.dup(0)
    os.close(left)
    assert left == free
