"""Child processes for work that must not harm the gateway (`helper`), warm and replaced.

A pool has a few of one kind. Whoever has a job (a thread, never the event loop) waits for one that
is free. One whose job passes a limit is dead, and another is started in its place.
"""

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from pagefleet_gateway.errors import unavailable
from pagefleet_gateway.sandbox.helper import OUT_OF_MEMORY, Limits

START_SECONDS: Final = 60.0
"""Until a helper is ready, on a busy machine."""

WAIT_SECONDS: Final = 2.0
"""For a helper that is free."""

_KILLED: Final = (-signal.SIGKILL, -signal.SIGTERM)


class LimitError(Exception):
    """A job passed a limit; says which, as the end of a sentence that begins with `it`."""


class KilledError(LimitError):
    """Its helper was killed: by the kernel, which lacks memory, or by anybody."""


class HelperError(Exception):
    """A helper cannot begin; says why."""


class Helper:
    """One process, which works on one job at a time."""

    def __init__(self, kind: str, content: bytes, limits: Limits) -> None:
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pagefleet_gateway.sandbox.helper", kind, str(fd)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[fd],
                process_group=0,  # Ctrl-C in a terminal is for the gateway, which drains
            )
        self._limits = limits
        self._pipe = ours
        self._ready = False
        self.end = weakref.finalize(self, _end, self._process, ours)
        """Kills it."""
        with suppress(ConnectionError):  # whoever waits until it is ready will know
            ours.send_bytes(msgspec.msgpack.encode(limits))
            ours.send_bytes(content)

    def __repr__(self) -> str:
        return f"<Helper {self._process.pid} {'alive' if self.alive else 'dead'}>"

    @property
    def alive(self) -> bool:
        """Whether it can take a job."""
        return self.end.alive and self._process.poll() is None

    def run(self, job: bytes) -> bytes:
        """Do a job.

        Raises:
            LimitError: it passed a limit, and the helper is dead.
            HelperError: the helper never became ready.
        """
        self.await_ready()
        try:
            self._pipe.send_bytes(job)
            if self._pipe.poll(self._limits.seconds):
                return self._pipe.recv_bytes()
        except (EOFError, ConnectionError):
            cause = self._cause_of_death()
            killed = self._process.returncode in _KILLED
            raise (KilledError if killed else LimitError)(cause) from None
        self.end()
        raise LimitError(f"it takes more than {self._limits.seconds:g} seconds")

    def await_ready(self) -> None:
        """Wait until it has begun.

        Raises:
            HelperError: it did not.
        """
        if self._ready:
            return
        refusal = b"It was not ready in time."
        try:
            if self._pipe.poll(START_SECONDS):
                refusal = self._pipe.recv_bytes()
        except (EOFError, ConnectionError):
            refusal = f"It is not usable: {self._cause_of_death()}.".encode()
        if refusal:
            self.end()
            raise HelperError(refusal.decode())
        self._ready = True

    def _cause_of_death(self) -> str:
        self._process.wait()
        status = self._process.returncode
        self.end()
        if status == -signal.SIGPROF:
            return f"it takes more than {self._limits.cpu_seconds:g} seconds of processor time"
        if status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGKILL):
            return f"it takes more than {self._limits.memory >> 20} MiB of memory"
        return f"it ends the process that works on it with status {status}"


class HelperPool:
    """`size` helpers of one kind; `content` is what each needs to begin.

    A job whose helper was killed is done again, once: it may have had no part in that.

    wait: seconds that a job waits for one that is free.
    """

    def __init__(
        self, kind: str, content: bytes, limits: Limits, size: int, wait: float = WAIT_SECONDS
    ) -> None:
        self._kind, self._content, self._limits, self._wait = kind, content, limits, wait
        self._idle: queue.SimpleQueue[Helper] = queue.SimpleQueue()
        for _ in range(size):
            self._idle.put(self._new())

    def __repr__(self) -> str:
        return f"<HelperPool: {self._idle.qsize()} idle>"

    def await_ready(self) -> None:
        """Wait for the first.

        Raises:
            HelperError: it cannot begin.
        """
        helper = self._idle.get()
        try:
            helper.await_ready()
        finally:
            self._idle.put(helper)

    def run(self, job: bytes) -> bytes:
        """Do a job in whichever is free first.

        Raises:
            LimitError: it passed a limit.
            ApiError: 503, none became free in time, or none can be started.
        """
        try:
            helper = self._idle.get(timeout=self._wait)
        except queue.Empty:
            text = "Too many requests with templates and grammars came at once."
            raise unavailable(text, "overloaded") from None
        try:
            if not helper.alive:
                helper = self._new()
            try:
                return helper.run(job)
            except KilledError:
                helper = self._new()
                return helper.run(job)
        except LimitError:
            with suppress(OSError):  # the next job needs one, and tries again
                helper = self._new()
            raise
        except (HelperError, OSError) as error:
            text = f"A process that this request needs cannot be started: {error}"
            raise unavailable(text, "overloaded") from error
        finally:
            self._idle.put(helper)

    def _new(self) -> Helper:
        return Helper(self._kind, self._content, self._limits)


def _end(process: "subprocess.Popen[bytes]", pipe: Connection) -> None:
    process.kill()
    process.wait()
    pipe.close()
