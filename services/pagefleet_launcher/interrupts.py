"""The signals that the launcher handles.

SIGINT and SIGTERM drain; a SIGINT during the drain (a second Ctrl-C) kills at once. A second
SIGTERM does not, because timeout(1) and others send it to a process and to its group. SIGHUP
replaces all processes, as with most servers; but one that comes because the terminal was closed
drains, or under nohup(1) does nothing. When the event loop has ended, little is left to do, and no
signal interrupts it; asyncio's own handlers are gone by then, so they are not used.
"""

import asyncio
import os
import signal
from functools import partial
from types import FrameType


class Interrupts:
    """Events: `restart` asks for new processes, `drain` for an end, `kill` for one at once."""

    def __init__(self) -> None:
        self.restart = asyncio.Event()
        self.drain = asyncio.Event()
        self.kill = asyncio.Event()
        self._nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._terminal = has_terminal()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self._loop.is_closed():
            act = self._hang_up if number == signal.SIGHUP else partial(self._end, number)
            self._loop.call_soon_threadsafe(act)

    def _end(self, number: int) -> None:
        if self.drain.is_set() and number == signal.SIGINT:
            self.kill.set()
        self.drain.set()

    def _hang_up(self) -> None:
        had, self._terminal = self._terminal, has_terminal()
        if had == self._terminal:
            self.restart.set()
        elif not self._nohup:
            self.drain.set()


def has_terminal() -> bool:
    """Whether this process has a controlling terminal that is not closed yet."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
