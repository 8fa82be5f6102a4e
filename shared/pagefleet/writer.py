"""What a process writes to its standard streams, text by text, by a thread of its own.

Whoever reads it may be gone (EPIPE), have no room left (ENOSPC), or have stopped to read: a
terminal under Ctrl-S, a journal whose disk is slow. A process does what it is there for whether or
not it is heard, so it never waits for a reader. What waits for one is bounded; texts beyond that
are lost and counted, and those that cannot be written are lost.
"""

import atexit
import contextlib
import io
import os
import queue
import sys
import threading

MOST_WAITING = 4 * 2**20
"""Bytes of memory for texts that wait to be written; one may go beyond that."""

FAREWELL_SECONDS = 1.0
"""That the last texts have to get out when the process ends."""

STDOUT, STDERR = 1, 2


class Writer:
    """Writes texts to descriptors in the order in which they come.

    What comes from a finalizer, in the midst of another `put`, does not wait for that one's end: a
    SimpleQueue may be entered again, as a Queue may not. So the bound is counted here, by sums that
    only grow, each on one side of the queue.
    """

    def __init__(self) -> None:
        self._texts: queue.SimpleQueue[tuple[int, str] | threading.Event] = queue.SimpleQueue()
        self._taken = self._written = 0
        self.lost = 0
        """Texts that found no room, since it was last told."""
        self._thread: threading.Thread | None = None

    def put(self, descriptor: int, text: str) -> None:
        """Have a text written; does not wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="writer", daemon=True)
            self._thread.start()
            atexit.register(self.flush)
        if self._taken - self._written >= MOST_WAITING:
            self.lost += 1
            return
        if self.lost:
            text = f"({self.lost} lines are lost: nobody read them in time)\n{text}"
            self.lost = 0
        self._taken += sys.getsizeof(text)
        self._texts.put((descriptor, text))

    def flush(self) -> None:
        """Wait until all is written, but not for long."""
        if self._thread is not None:
            done = threading.Event()
            self._texts.put(done)
            done.wait(FAREWELL_SECONDS)

    def _write_all(self) -> None:
        while True:
            match self._texts.get():
                case descriptor, text:
                    _write(descriptor, text)
                    self._written += sys.getsizeof(text)
                case threading.Event() as done:
                    done.set()


class _StandardError(io.TextIOBase):
    """Standard error, where nobody waits for its reader."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return STDERR

    def write(self, text: str) -> int:
        put(STDERR, text)
        return len(text)


def take_standard_error() -> None:
    """Have all that Python writes to `sys.stderr` go this way: logs, warnings, tracebacks."""
    open_standard_streams()
    sys.stderr = _StandardError()


def open_standard_streams() -> None:
    """Put /dev/null where whoever started this closed its standard input, output or error.

    A socket that got one of their numbers would be written to in their place, and lost where a
    process is started with others.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)


def _write(descriptor: int, text: str) -> None:
    left = text.encode(errors="replace")
    with contextlib.suppress(OSError):
        while left:
            left = left[os.write(descriptor, left) :]


_writer = Writer()
put, flush = _writer.put, _writer.flush
"""Those of this process."""
