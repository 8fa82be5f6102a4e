"""Signs of life for whoever supervises this process, by the protocol of sd_notify(3).

A service says from its main loop that it lives, and whether it is ready; if it has done so before
and then falls silent, its supervisor takes it for hung. `pagefleet serve` listens, and so does
systemd (`Type=notify`, `WatchdogSec=`). If no supervisor listens, nothing is said.
"""

import contextlib
import os
import socket
from collections.abc import Mapping

ADDRESS = "NOTIFY_SOCKET"
"""The environment variable that names the supervisor's socket; `@` begins an abstract name."""

BEAT_SECONDS = 0.2
"""Time between two signs of life."""

ALIVE, READY = b"WATCHDOG=1", b"READY=1"


class Notifier:
    """Tells this process's supervisor, if `environment` names one, that it lives."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._due = 0.0
        self._socket: socket.socket | None = None
        if address := environment.get(ADDRESS):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._address = address.replace("@", "\0", 1) if address[0] == "@" else address

    def beat(self, now: float, *, ready: bool) -> None:
        """Say that the main loop turns, if it is time to; to be called at every turn.

        Args:
            now: seconds on a monotonic clock.
            ready: whether the service can do its work. It is said with every beat, so that a lost
                one does not matter.
        """
        if self._socket is None or now < self._due:
            return
        self._due = now + BEAT_SECONDS
        with contextlib.suppress(OSError):  # the supervisor is gone, or does not listen now
            self._socket.sendto(ALIVE + b"\n" + READY if ready else ALIVE, self._address)

    def close(self) -> None:
        """Say nothing any more."""
        if self._socket is not None:
            self._socket.close()
