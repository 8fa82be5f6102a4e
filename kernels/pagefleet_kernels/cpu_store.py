"""Compiled kernels on disk: machine code, found by what it was made from.

The name of a file stands for all that its code follows from: every source of this package (a kernel
is put together from several), the compilers, the processor, the function and what it closes over.
Where the sources lie and when they were written is no part of it, so that all checkouts,
installations and containers of a version use what one of them compiled. (numba's own cache goes by
path, and sees changes only in the file of the function itself.)

A file is locked while code is looked for in it or written: of processes that need a kernel at once,
one compiles it. It begins with a digest of the rest, so that what was written in part is compiled
again. No disk is needed: where it is full, read-only or missing, code lasts as long as its process.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import inspect
import io
import logging
import os
import pathlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import llvmlite
import numba
from numba.core import registry

_log = logging.getLogger(__name__)

_VERSIONS_KEPT = 8
"""Versions of the kernels whose compiled code stays on disk."""

_DIGEST_BYTES = hashlib.sha256().digest_size


def _version() -> str:
    digest = hashlib.sha256(f"numba {numba.__version__} llvmlite {llvmlite.__version__}".encode())
    for source in sorted(pathlib.Path(__file__).parent.glob("*.py")):
        if not source.name.startswith("triton_"):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:8]


VERSION = _version()
"""Eight hexadecimal digits that tell versions of the CPU kernels and their compilers apart; of the
sources as they are when they are imported.
"""


@dataclass(frozen=True)
class Code:
    """A compiled function: an object file, and the function's symbol in it."""

    symbol: str
    machine_code: bytes


def kept(function: Callable[..., Any], compiled: Callable[[], Code]) -> Code:
    """The code of a function of this package, which `compiled` makes where it is not on disk.

    The function may close over values only whose `repr` says all that they are: one that tells an
    address is never found again.
    """
    processor = registry.cpu_target.target_context.codegen().magic_tuple()
    closure = sorted(inspect.getclosurevars(function).nonlocals.items())
    name = f"{function.__module__}.{function.__qualname__}"
    made_from = repr((sys.implementation.cache_tag, processor, name, closure))
    key = hashlib.sha256(made_from.encode()).hexdigest()[:16]
    with _opened(f"{function.__name__}-{key}") as file:
        digest, content = file.read(_DIGEST_BYTES), file.read()
        if digest == hashlib.sha256(content).digest():
            symbol, _, machine_code = content.partition(b"\0")
            return Code(symbol.decode(), machine_code)
        code = compiled()
        _write(file, code.symbol.encode() + b"\0" + code.machine_code)
        return code


@functools.cache
def _folder() -> pathlib.Path:
    """Where code of this version is kept; it may be missing."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder") from error
    folder = pathlib.Path(home, "pagefleet", "kernels", VERSION)
    _forget_old_versions(folder)
    return folder


def _opened(name: str) -> IO[bytes]:
    """A file that no other process has: for reading only where nothing can be written, and in
    memory where nothing can be read.
    """
    try:
        path = _folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        file = path.open("r+b", buffering=0)
        with contextlib.suppress(OSError):  # of file systems that have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        with contextlib.suppress(OSError):
            return (_folder() / name).open("rb")
        _warn(error.strerror)
        return io.BytesIO()
    return file


def _write(file: IO[bytes], content: bytes) -> None:
    try:
        file.seek(0)
        file.truncate()
        if file.write(hashlib.sha256(content).digest() + content) < _DIGEST_BYTES + len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        _warn(error.strerror or str(error))


@functools.cache
def _warn(reason: str) -> None:
    _log.warning("compiled kernels cannot be kept for later starts: %s", reason)


def _forget_old_versions(folder: pathlib.Path) -> None:
    """Leave the `_VERSIONS_KEPT` last used of this folder and its neighbours; whoever still uses
    another compiles again.
    """
    with contextlib.suppress(OSError):  # another process may do the same
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        versions = sorted(folder.parent.iterdir(), key=lambda version: version.stat().st_mtime)
        for version in versions[:-_VERSIONS_KEPT]:
            shutil.rmtree(version, ignore_errors=True)
