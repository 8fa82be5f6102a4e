import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.drill.processes import is_alive, kill

HERE = Path(__file__).parent


class Event(NamedTuple):
    name: str
    what: str
    pid: int
    time: float


def wait_until(condition, seconds=60.0):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return value


class Cell:
    """A supervisor in a process of its own (cell.py), and what its stand-ins noted."""

    def __init__(self, folder):
        self.events_file = folder / "events"
        self.events_file.touch()
        self.process = None

    def command(self, name, behaviour="serve"):
        arguments = [name, str(self.events_file), behaviour]
        return [sys.executable, "-S", str(HERE / "stand_in.py"), *arguments]

    def start(self, *stages, drain_timeout=10.0, wrapper=(), stdin=None, **options):
        """Supervise `stages`, each a dict of names and behaviours; wait until all have started.

        `wrapper` is what runs the supervisor, `options` are of every `Service`.
        """
        told = [
            [{"name": n, "command": self.command(n, b), **options} for n, b in stage.items()]
            for stage in stages
        ]
        supervisor = [sys.executable, str(HERE / "cell.py"), json.dumps(told), str(drain_timeout)]
        self.process = subprocess.Popen(
            [*wrapper, *supervisor],
            stdin=stdin,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=bool(wrapper),
        )
        for stage in stages:
            for name in stage:
                self.wait_for(name, "started")

    def events(self, name=None, what=None):
        lines = [line.split() for line in self.events_file.read_text().splitlines()]
        events = [Event(name, what, int(pid), float(time)) for name, what, pid, time in lines]
        return [e for e in events if name in (None, e.name) and what in (None, e.what)]

    def wait_for(self, name, what, count=1):
        """The `count`-th event of this kind."""
        return wait_until(lambda: self.events(name, what)[count - 1 : count])[0]

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def heard(self):
        """Lines of standard error, as they come."""
        return iter(self.process.stderr.readline, "")

    def end(self):
        """Exit status and standard error."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def alive(self):
        return {event.pid for event in self.events() if is_alive(event.pid)}


@pytest.fixture
def cell(tmp_path):
    cell = Cell(tmp_path)
    yield cell
    if cell.process is not None:
        with cell.process:
            cell.process.kill()
    for pid in cell.alive():
        kill(pid)
