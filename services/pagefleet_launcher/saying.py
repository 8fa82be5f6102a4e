"""What the launcher writes, line by line, by a thread of its own.

Whoever reads it may be gone (EPIPE), have no room left (ENOSPC), or have stopped to read: a
terminal under Ctrl-S, a journal whose disk is slow. The launcher does what it is there for whether
or not it is heard, so it never waits for a reader. What waits for one is bounded; lines beyond that
are lost and counted, and those that cannot be written are lost.
"""

import atexit
import contextlib
import os
import queue
import threading

LONGEST_QUEUE = 10_000
"""Lines that wait to be written."""

FAREWELL_SECONDS = 1.0
"""That the last lines have to get out when the process ends."""

_STDOUT, _STDERR = 1, 2


def say(name: str, text: str) -> None:
    """Write one line to standard error, marked with the process it is about."""
    _writer.put(_STDERR, f"{name:>11} | {text}\n")


def announce(text: str) -> None:
    """Write a text to standard output."""
    _writer.put(_STDOUT, text + "\n")


class Writer:
    """Writes texts to descriptors in the order in which they come."""

    def __init__(self) -> None:
        self._texts: queue.Queue[tuple[int, str] | None] = queue.Queue(LONGEST_QUEUE)
        self.lost = 0
        """Texts that found no room, since it was last told."""
        self._thread: threading.Thread | None = None

    def put(self, descriptor: int, text: str) -> None:
        """Have a text written; does not wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="writer", daemon=True)
            self._thread.start()
            atexit.register(self._finish)
        try:
            self._texts.put_nowait((descriptor, text))
        except queue.Full:
            self.lost += 1

    def _write_all(self) -> None:
        while (item := self._texts.get()) is not None:
            descriptor, text = item
            if lost := self.lost:
                self.lost -= lost
                text = f"({lost} lines are lost: nobody read them in time)\n{text}"
            left = text.encode(errors="replace")
            with contextlib.suppress(OSError):
                while left:
                    left = left[os.write(descriptor, left) :]

    def _finish(self) -> None:
        with contextlib.suppress(queue.Full):
            self._texts.put(None, timeout=FAREWELL_SECONDS)
        if self._thread is not None:
            self._thread.join(FAREWELL_SECONDS)


_writer = Writer()
