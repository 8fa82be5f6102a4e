"""ZeroMQ sockets that listen at an address: alone, and where others find them.

Left to itself, libzmq takes the address of a Unix socket away from whoever listens there, and does
not notice when the socket's file is deleted, as cleaners of /tmp do: then nobody new finds it. So
the address is held by a lock on a file beside it (flock(2)), which the kernel releases however the
holder ends. Whoever has the lock still checks that nobody listens, in case the lock's file was
deleted too. And once in a while the listener looks for the socket's file, and listens there again
if it is gone. Only if both files were deleted can another process have taken the address: then that
one keeps it, because newcomers find that one, and the process that had it before is told.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import TypeAlias

import zmq

from pagefleet.endpoint import EndpointError

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # between two looks at whether the file is still there

_Socket: TypeAlias = "zmq.Socket[bytes]"


class TakenError(EndpointError):
    """Another process listens at an address."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(
            f"{endpoint}: another process listens there; end it, or choose another address"
        )


class Listener:
    """Makes a socket listen at `endpoint`; for a Unix socket, makes its folder too.

    Raises:
        EndpointError: it is taken, or cannot be had.
    """

    def __init__(self, socket: _Socket, endpoint: str) -> None:
        self._socket, self._endpoint = socket, endpoint
        self._look_due = 0.0
        self._trouble = ""
        """Why it cannot be found, as it was logged last."""
        self._lock: int | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode of the Unix socket at which it listens."""
        if not endpoint.startswith("ipc://"):
            self._bind()
            return
        self._path = Path(endpoint.removeprefix("ipc://"))
        try:
            self._claim()
        except EndpointError:
            self.close()
            raise

    def stay_found(self, now: float) -> None:
        """Listen again at a Unix socket whose file is gone; to be called once in a while.

        Connections stay as they are.

        Args:
            now: seconds on a monotonic clock.

        Raises:
            TakenError: another process has taken the address.
        """
        if self._lock is None or now < self._look_due:
            return
        self._look_due = now + _LOOK_SECONDS
        if (there := _identity(self._path)) and there == self._file:
            return
        try:
            self._claim()
        except TakenError:
            raise
        except EndpointError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("nobody can join where the file was deleted: %s", error)
        else:
            self._trouble = ""
            log.warning("%s was deleted; it is there again", self._endpoint)

    def close(self) -> None:
        """Release the address; the socket is closed."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self) -> None:
        _make_folder(self._endpoint, self._path.parent)
        self._hold()
        try:
            is_taken = _is_listened_at(self._path)
        except OSError as error:
            raise self._refusal(error) from error
        if is_taken:
            raise TakenError(self._endpoint)
        self._bind()
        self._file = _identity(self._path)

    def _hold(self) -> None:
        """Hold the lock of the file that is at the lock's path now."""
        path = self._path.with_name(f"{self._path.name}.lock")
        if self._lock is not None and _identity(path) == _identity(self._lock):
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        try:
            lock = os.open(path, flags, 0o600)
        except OSError as error:
            raise self._refusal(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise TakenError(self._endpoint) from None
        self.close()
        self._lock = lock

    def _bind(self) -> None:
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError | zmq.ZMQError) -> EndpointError:
        return EndpointError(f"{self._endpoint}: cannot listen there: {error.strerror}")


def _make_folder(endpoint: str, folder: Path) -> None:
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise EndpointError(
            f"{endpoint}: the folder {folder} cannot be made: {error.strerror}; choose another"
        ) from error
    if owner not in (0, os.geteuid()):
        raise EndpointError(
            f"{endpoint}: {folder} belongs to another user, who could put a socket of their own in "
            "this one's place; choose a folder of yours"
        )


def _is_listened_at(path: Path) -> bool:
    """Whether a process accepts connections at a Unix socket, or will when it comes to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)


def _identity(file: Path | int) -> tuple[int, int] | None:
    """Device and inode of a file, if it is there."""
    with contextlib.suppress(OSError):
        about = os.stat(file)
        return about.st_dev, about.st_ino
    return None
