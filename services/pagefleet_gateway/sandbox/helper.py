"""A child process that does one kind of dangerous work.

What comes from outside and computes (a model's chat template, a client's grammar) runs here, where
it can take nothing but its own time and memory. The parent (`helpers`) starts it as `python -m
pagefleet_gateway.sandbox.helper KIND FD` and talks over the socket FD in frames of bytes: first
`Limits`, then what the kind needs to begin, answered by an empty frame or by what is wrong with it,
then a frame for each job, answered by one. A job that takes too much processor time is ended by the
kernel, one that takes too much memory ends itself, and the parent ends one that takes too long: the
process goes with it.
"""

import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

import msgspec

OUT_OF_MEMORY: Final = 3
"""Status of a helper that ended because its memory did not suffice."""

Work: TypeAlias = Callable[[bytes], bytes]
"""Does a job."""

Begin: TypeAlias = Callable[[bytes], Work]
"""Makes a helper ready; raises a ValueError that says what is wrong."""

_Done = TypeVar("_Done")


class Limits(msgspec.Struct, frozen=True):
    """What one job may take."""

    cpu_seconds: float
    seconds: float
    """By the clock; the parent counts them."""
    memory: int
    """Bytes of address space, beyond those of a helper that has loaded its code."""


def main(kind: str, fd: str) -> None:
    """Work until the parent is gone."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with Connection(int(fd)) as parent:
        try:
            begin = KINDS[kind]()
            limits = msgspec.msgpack.decode(parent.recv_bytes(), type=Limits)
            _limit_memory(limits.memory)
            try:
                work = _timed(begin, limits.cpu_seconds)(parent.recv_bytes())
            except ValueError as error:
                parent.send_bytes(str(error).encode())
                return
            parent.send_bytes(b"")
            work = _timed(work, limits.cpu_seconds)
            while True:
                parent.send_bytes(work(parent.recv_bytes()))
        except (EOFError, ConnectionError):
            return
        except MemoryError:
            sys.exit(OUT_OF_MEMORY)


def _timed(work: Callable[[bytes], _Done], cpu_seconds: float) -> Callable[[bytes], _Done]:
    """The same work, which ends the process when it computes for longer."""

    def work_in_time(job: bytes) -> _Done:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF ends a process by default
        try:
            return work(job)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    return work_in_time


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _grammar() -> Begin:
    from pagefleet_gateway.sandbox.grammar import begin

    return begin


def _template() -> Begin:
    from pagefleet_gateway.sandbox.template import begin

    return begin


KINDS: Final[dict[str, Callable[[], Begin]]] = {"grammar": _grammar, "template": _template}
"""What helpers there are; each loads the code of its own work only."""


if __name__ == "__main__":
    main(*sys.argv[1:])
