"""One operating-system process of ours: how it starts, what it writes, how its end is noticed.

A process runs tethered (pagefleet.tether) and in a process group of its own, so that Ctrl-C in the
terminal reaches only the launcher, and whatever the process started can be ended with it. Its end
is noticed through a pidfd (pidfd_open(2)): it is still a zombie then, so that no other process can
have got its number before the rest of its group is killed. That it lives, and is ready, it says
itself (signs.py).
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from pagefleet import notify
from pagefleet.tether import tethered
from pagefleet_launcher.saying import say
from pagefleet_launcher.signs import Signs

LONGEST_LINE = 2**20
"""Bytes of a line; a longer one is passed on in pieces."""

_OUTPUT_AFTER_DEATH = 1.0  # seconds to wait for the last lines of a dead process


def describe(status: int) -> str:
    """How a process ended, from its `Popen.returncode`."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


class Process:
    """A process that runs `command`; all that it writes is passed on, or its output is kept.

    command: the path of an executable, then its arguments. fds: descriptors that it inherits.
    environment: variables to add to ours. capture: keep its standard output for `output` and leave
    its standard error alone (so that progress bars work), rather than passing both on line by line.

    Start it from the main thread: the tether is tied to the thread.

    Raises:
        OSError: it cannot be started, for example because no process or descriptor is left.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        capture: bool = False,
    ) -> None:
        self._name = name
        self._capture = capture
        self.signs = Signs()
        try:
            self._start(command, fds, environment or {})
        except OSError:
            self.signs.close()
            raise
        self.output = ""

    def _start(
        self, command: Sequence[str], fds: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        reading, writing = os.pipe()
        self._output = os.fdopen(reading, "rb")
        try:
            self._popen = subprocess.Popen(
                tethered(command),
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=None if self._capture else writing,
                pass_fds=fds,
                process_group=0,
                env={
                    **os.environ,
                    **environment,
                    notify.ADDRESS: self.signs.address,
                    "PYTHONUNBUFFERED": "1",
                },
            )
            try:
                self._pidfd = os.pidfd_open(self._popen.pid)
            except OSError:
                self._end()
                raise
        except OSError:
            self._output.close()
            raise
        finally:
            os.close(writing)

    def __repr__(self) -> str:
        return f"<Process {self._name} pid={self._popen.pid}>"

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended: its number may be another process's by then."""
        if self._popen.returncode is None:
            os.kill(self._popen.pid, number)

    def kill(self) -> None:
        """End it and its whole group at once, unless it has ended."""
        if self._popen.returncode is None:
            os.killpg(self._popen.pid, signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for its end, and kill what is left of its group; returns its `Popen.returncode`.

        Raises:
            OSError: the system lacks the means to watch it; it was killed.
        """
        loop = asyncio.get_running_loop()
        output = _Output(None if self._capture else self._name)
        end = asyncio.Event()
        try:
            pipe, _ = await loop.connect_read_pipe(lambda: output, self._output)
            self.signs.listen(self._popen.pid)
            loop.add_reader(self._pidfd, end.set)
            await end.wait()
        finally:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self.signs.close()
            status = self._end()
        await asyncio.wait([output.closed], timeout=_OUTPUT_AFTER_DEATH)
        pipe.close()
        self.output = output.kept.decode(errors="replace")
        return status

    def _end(self) -> int:
        """Kill it if it still runs, and what is left of its group; returns its status."""
        self.kill()
        return self._popen.wait()


class _Output(asyncio.Protocol):
    """What a process writes: passed on line by line under `name`, or kept if that is None."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self.kept = b""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.kept += data
        if self._name is not None:
            *lines, self.kept = self.kept.split(b"\n")
            if len(self.kept) > LONGEST_LINE:
                lines.append(self.kept)
                self.kept = b""
            for line in lines:
                say(self._name, line.decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._name is not None and self.kept:
            say(self._name, self.kept.decode(errors="replace"))
        self.closed.set_result(None)
