"""What compiled kernels leave on disk."""

import ctypes
import fcntl
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
from numba import carray

from pagefleet_kernels import cpu_launch, cpu_store
from pagefleet_kernels.cpu_store import Code
from tests.processes import killed_in_the_end, may_mount
from tests.unit.launcher.conftest import wait_until

PACKAGE = "pagefleet_kernels"

COMPILE = """
import torch
from numba.core.event import install_recorder
from pagefleet_kernels import cpu_layers, reference
values, weight = torch.randn(3, 25), torch.randn(25)
with install_recorder("numba:compile") as compilations:
    normed = cpu_layers.rms_norm(values, weight, 1e-6)
torch.testing.assert_close(normed, reference.rms_norm(values, weight, 1e-6))
print(len(compilations.buffer))
"""

KEEP = """
from pagefleet_kernels.cpu_store import Code, kept
def function(pointer): pass
def compiled():
    print("compiled")
    return Code("symbol", bytes(10000))
for _ in range(2):
    assert kept(function, compiled) == Code("symbol", bytes(10000))
"""


def environment(cache: Path, kernels: Path) -> dict[str, str]:
    """In which processes keep compiled kernels in `cache`, and import them from `kernels`."""
    path = os.pathsep.join([str(kernels), *sys.path])
    return os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": path}


def compilations(cache: Path, kernels: Path) -> int:
    """How many functions a process compiles for a kernel."""
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment(cache, kernels), stdout=PIPE, check=True)
    return int(done.stdout)


def said_where(disk: str, cache: Path, kernels: Path) -> str:
    """What a process says that needs a code twice; `disk` is run before, and nobody else sees what
    it mounts.
    """
    places = environment(cache, kernels)
    command = ["unshare", "--mount", "sh", "-c", f'{disk} && exec "$@"', "sh", sys.executable]
    done = subprocess.run(
        [*command, "-c", KEEP], env=places, stdout=PIPE, stderr=STDOUT, check=True
    )
    return done.stdout.decode()


def copied(kernels: Path, folder: Path) -> Path:
    """The same sources in another folder, as if they had just been written."""
    shutil.copytree(kernels / PACKAGE, folder / PACKAGE, copy_function=shutil.copy)
    return folder


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources that nobody changes in the meantime."""
    folder = Path(cpu_store.__file__).parents[1]
    return copied(folder, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, kernels: Path) -> Path:
    """Where a kernel is kept."""
    folder = tmp_path_factory.mktemp("cache")
    assert compilations(folder, kernels) > 0
    return folder


def test_sources_of_another_place_and_time_use_the_same_code(cache, kernels, tmp_path):
    assert compilations(cache, copied(kernels, tmp_path)) == 0


def test_a_change_in_any_source_makes_new_code(cache, kernels, tmp_path):
    others = copied(kernels, tmp_path / "kernels")
    with (others / PACKAGE / "cpu_simd.py").open("a") as source:
        source.write("# changed\n")
    copy = shutil.copytree(cache, tmp_path / "cache")
    assert compilations(copy, others) > 0


def test_of_processes_that_need_a_kernel_at_once_one_compiles_it(cache, kernels, tmp_path):
    """The others wait for its file, and use what is in it then."""
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
    [kept] = tmp_path.rglob("compiled_norm-*")
    code = kept.read_bytes()
    with kept.open("w+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = [sys.executable, "-c", COMPILE]
        waiting = subprocess.Popen(command, env=environment(tmp_path, kernels), stdout=PIPE)
        with killed_in_the_end(waiting):
            waits = f"-> FLOCK  ADVISORY  WRITE {waiting.pid} "
            wait_until(lambda: waits in Path("/proc/locks").read_text())
            file.write(code)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_UN)
            assert waiting.communicate() == (b"0\n", None)


@pytest.mark.skipif(not may_mount(), reason="a process may mount nothing here")
def test_where_nothing_can_be_written_kernels_are_compiled_for_the_process(kernels, tmp_path):
    """A read-only disk may have what was kept before."""
    said = partial(said_where, cache=tmp_path, kernels=kernels)
    compiled, lost = "compiled\n", "compiled kernels cannot be kept for later starts"
    full = f"mount -t tmpfs -o size=8k none {tmp_path}"
    assert said(full) == f"{compiled}{lost}: No space left on device\n{compiled}"
    read_only = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path}"
    assert said(read_only) == f"{lost}: Read-only file system\n{compiled * 2}"
    assert said("true") == compiled
    assert said(read_only) == ""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this process keeps what it compiles."""
    monkeypatch.setattr(cpu_store, "_folder", lambda: tmp_path / "version")
    return tmp_path / "version"


def function_of(number: int) -> Callable[[Any], None]:
    def closure(pointer: Any) -> None:
        pointer[0] += number

    return closure


def test_without_a_home_kernels_are_compiled_for_the_process(monkeypatch, caplog):
    monkeypatch.setattr(cpu_store, "_folder", cpu_store._folder.__wrapped__)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    for code in (Code("symbol", b"one"), Code("symbol", b"two")):
        assert cpu_store.kept(function_of(1), lambda: code) == code  # noqa: B023
    assert "for later starts: this user has no home folder" in caplog.text


def test_what_is_damaged_is_compiled_again(folder):
    code = Code("symbol", random.randbytes(200))
    assert cpu_store.kept(function_of(1), lambda: code) == code
    [file] = folder.iterdir()
    whole = file.read_bytes()
    place = random.randrange(len(whole))
    for damaged in (
        whole[:place],
        whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :],
        bytes(len(whole)),
        whole + b"more",
    ):
        file.write_bytes(damaged)
        other = Code("symbol", random.randbytes(random.randrange(400)))
        assert cpu_store.kept(function_of(1), lambda: other) == other  # noqa: B023
        assert cpu_store.kept(function_of(1), lambda: code) == other


def test_what_a_function_closes_over_is_told_apart(folder):
    codes = [Code("symbol", bytes([number])) for number in range(3)]
    for number, code in enumerate(codes):
        assert cpu_store.kept(function_of(number), lambda: code) == code  # noqa: B023
    for number, code in enumerate(codes):
        assert cpu_store.kept(function_of(number), pytest.fail) == code


def test_code_that_holds_an_address_is_refused(folder):
    """Other processes would call whatever lies there."""
    absolute = ctypes.CDLL(None).labs
    absolute.argtypes, absolute.restype = [ctypes.c_long], ctypes.c_long

    class Record(ctypes.Structure):
        _fields_ = cpu_launch.fields("number")

    def calls_c(pointer: Any) -> None:
        absolute(carray(pointer, 1)[0].number)

    with pytest.raises(ValueError, match="calls_c holds an address, which other processes lack"):
        cpu_launch.Kernel(calls_c, Record)
    assert cpu_store.kept(calls_c, lambda: Code("none", b"")) == Code("none", b"")


def test_compiled_kernels_of_old_versions_are_removed(tmp_path):
    versions = [tmp_path / str(number) for number in range(12)]
    for age, version in enumerate(versions):
        version.mkdir()
        (version / "kernel").touch()
        os.utime(version, (1e9 - age, 1e9 - age))
    cpu_store._forget_old_versions(versions[11])
    assert {*tmp_path.iterdir()} == {*versions[:7], versions[11]}
