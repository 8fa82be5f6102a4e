"""What compiled kernels leave on disk."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagefleet_kernels import cpu_launch
from tests.processes import killed_in_the_end, may_mount
from tests.unit.launcher.conftest import wait_until

COMPILE = (
    "import torch; from pagefleet_kernels import cpu_cache; "
    "cpu_cache.warm_up(torch.float32, torch.float32)"
)
LOCK = "pagefleet_kernels.cpu_cache._kernel.<locals>.cache_kernel.lock"


def test_compiled_kernels_of_old_versions_are_removed(tmp_path):
    versions = [tmp_path / str(number) for number in range(12)]
    for age, version in enumerate(versions):
        version.mkdir()
        (version / "kernel.nbc").touch()
        os.utime(version, (1e9 - age, 1e9 - age))
    cpu_launch._forget_old_versions(versions[11])
    assert {*tmp_path.iterdir()} == {*versions[:7], versions[11]}


def test_no_two_processes_compile_a_kernel_at_once(tmp_path):
    """Of two, numba's cache may give one the other's code."""
    cache = tmp_path / "pagefleet" / "kernels" / cpu_launch.source_digest()
    cache.mkdir(parents=True)
    places = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with (cache / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compiling = subprocess.Popen([sys.executable, "-c", COMPILE], env=os.environ | places)
        with killed_in_the_end(compiling):
            waiting = f"-> FLOCK  ADVISORY  WRITE {compiling.pid} "
            wait_until(lambda: waiting in Path("/proc/locks").read_text())
            assert [*cache.iterdir()] == [cache / LOCK]
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert compiling.wait() == 0
    assert [*cache.rglob("*.nbc")]


@pytest.mark.skipif(not may_mount(), reason="a process may mount nothing here")
def test_kernels_are_compiled_where_the_disk_is_full(tmp_path):
    """They are kept somewhere else, for as long as the process needs them."""
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    cache.mkdir()
    elsewhere.mkdir()
    small = f"mount -t tmpfs -o size=200k none {cache} && exec {sys.executable} -c '{COMPILE}'"
    places = {
        "XDG_CACHE_HOME": str(cache),
        "TMPDIR": str(elsewhere),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = ["unshare", "--mount", "sh", "-c", small]
    done = subprocess.run(
        command, env=os.environ | places, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "for this run only: [Errno 28] No space left on device" in done.stderr
    assert [*elsewhere.rglob("*.nbc")]
