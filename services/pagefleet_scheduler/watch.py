"""Deaths of processes on this machine, reported by the kernel (pidfd) rather than by silence."""

import os

from pagefleet.host import host_id, start_time
from pagefleet.wire import WorkerHello


class ProcessWatch:
    """File descriptors that become readable when the process of a peer has ended."""

    def __init__(self) -> None:
        self._host = host_id()
        self._peers: dict[int, bytes] = {}

    def add(self, peer: bytes, hello: WorkerHello) -> int | None:
        """Watch the process that said Hello; returns the descriptor that will become readable.

        None if it runs on another machine, is gone already, or is watched already.
        """
        if hello.host != self._host or peer in self._peers.values():
            return None
        try:
            pidfd = os.pidfd_open(hello.pid)
        except OSError:
            return None
        try:
            same = start_time(hello.pid) == hello.started
        except OSError:
            same = False
        if not same:
            os.close(pidfd)
            return None
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
