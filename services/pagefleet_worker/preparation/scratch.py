"""Files and folders that are whole when they are seen, whatever happens while they are made."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_for(target: Path) -> Iterator[Path]:
    """An empty folder to make `target` in, beside it; one process at a time has it.

    It goes in the end. What one that was killed left there goes when the next begins.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        scratch = target.with_name(f".making-{target.name}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def publish(made: Path, target: Path) -> None:
    """Put a file, or a folder of files, in its place once its content is on the disk (fsync(2))."""
    for file in [*made.iterdir(), made] if made.is_dir() else [made]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if target.is_dir():
        shutil.rmtree(target)
    made.rename(target)
