"""A private folder that is removed with the process that made it, however that ends.

A process that is killed cannot remove its folder. So each holds a lock on its own (flock(2)), which
the kernel releases whatever happens, and whoever makes a folder removes those that nobody holds any
more, if they contain only sockets and their locks (`pagefleet.listening`): the user may have a
folder with such a name. Pids would not do: they may be other processes' by now. systemd-tmpfiles,
which removes what is old, spares what is locked (tmpfiles.d(5)).
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "pagefleet-serve-"


@contextlib.contextmanager
def private_folder(base: Path) -> Iterator[Path]:
    """A folder in `base` that only this user can enter, removed at the end.

    Also removes from `base` the folders of this user whose makers were killed.
    """
    for left in base.glob(f"{PREFIX}*"):
        _remove_if_left(left)
    # Until it is locked, a hidden name keeps others from removing it.
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
    with _opened(made) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made.rename(made.with_name(made.name[1:]))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    with contextlib.suppress(OSError), _opened(folder) as lock:  # gone, another user's, no folder
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = list(folder.iterdir())
            if all(file.is_socket() or file.suffix == ".lock" for file in left):
                for file in left:
                    file.unlink()
                folder.rmdir()


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
