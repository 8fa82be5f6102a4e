"""Deaths of processes on this machine, reported by the kernel (pidfd) rather than by silence."""

import contextlib
import os
import select

from pagefleet.host import host_id, start_time
from pagefleet.wire import WorkerHello


class ProcessWatch:
    """File descriptors that become readable when the process of a peer has ended."""

    def __init__(self) -> None:
        self._host = host_id()
        self._peers: dict[int, bytes] = {}

    def add(self, peer: bytes, hello: WorkerHello) -> int | None:
        """Watch the process that said Hello; returns the descriptor that will become readable.

        None if it runs on another machine, cannot be watched, or is watched already.

        Raises:
            ProcessLookupError: it has ended since.
        """
        if hello.host != self._host or peer in self._peers.values():
            return None
        with contextlib.ExitStack() as undo:
            try:
                pidfd = os.pidfd_open(hello.pid)
                undo.callback(os.close, pidfd)
                started = start_time(hello.pid)
            except ProcessLookupError:
                raise
            except OSError:
                return None
            if started != hello.started or _has_ended(pidfd):
                raise ProcessLookupError(f"process {hello.pid} has ended")
            undo.pop_all()
        self._peers[pidfd] = peer
        return pidfd

    def __contains__(self, fd: object) -> bool:
        return fd in self._peers

    def of(self, peer: bytes) -> int | None:
        """The descriptor that watches a peer's process, if there is one."""
        return next((pidfd for pidfd, each in self._peers.items() if each == peer), None)

    def end(self, pidfd: int) -> bytes:
        """Stop watching a process; returns its peer."""
        os.close(pidfd)
        return self._peers.pop(pidfd)


def _has_ended(pidfd: int) -> bool:
    """Whether a process is only waited for by its parent."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
