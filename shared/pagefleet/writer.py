"""What a process writes to its standard streams, text by text, in a thread of its own.

Whoever reads it may be gone (EPIPE), have no room left (ENOSPC), or have stopped reading: a
terminal under Ctrl-S, a journal whose disk is slow. A process has to do its work whether or not it
is heard, so it never waits for a reader. How much may wait is bounded; texts beyond that are lost
and counted, and those that cannot be written are lost.
"""

import atexit
import contextlib
import io
import os
import queue
import sys
import threading

MOST_WAITING = 4 * 2**20
"""Bytes of memory for texts that wait to be written; the last of them may go beyond that."""

FAREWELL_SECONDS = 1.0
"""Time that the last texts have to get out when the process ends."""

STDOUT, STDERR = 1, 2


class Writer:
    """Writes texts to descriptors in the order in which they come.

    A finalizer may call `put` in the midst of another `put`, and must not wait for its end. A
    SimpleQueue is reentrant, as a Queue is not; but it has no bound. So what waits is counted here,
    by two sums that only grow, each on one side of the queue.
    """

    def __init__(self) -> None:
        self._texts: queue.SimpleQueue[tuple[int, str] | threading.Event] = queue.SimpleQueue()
        self._taken = self._written = 0
        self.lost = 0
        """Texts that found no room since that was last reported."""
        self._thread: threading.Thread | None = None

    def put(self, descriptor: int, text: str) -> None:
        """Let a text be written; does not wait."""
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
    """Send all that Python writes to `sys.stderr` this way: logs, warnings, tracebacks."""
    open_standard_streams()
    sys.stderr = _StandardError()


def open_standard_streams() -> None:
    """Open /dev/null for each of standard input, output and error that was closed at the start.

    Else a socket could get one of their numbers: it would be written to in their place, and be
    lost when a process is started with others.
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
