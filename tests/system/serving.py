"""`pagefleet serve` as a process, for as long as a test needs it."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.processes import killed_in_the_end
from tests.unit.launcher.conftest import wait_until

START_SECONDS = 240
"""Compiling all kernels takes most of it, when they have changed."""

END_SECONDS = 60
"""Open streams may take half of it."""


class Serving:
    """A cell that is ready; `greeting` is what it said then."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process, self.log = process, log
        self.greeting = wait_until(self._greeting, seconds=START_SECONDS)
        told = re.search(r"Pagefleet serves (\S+) at (\S+)", self.greeting)
        self.model, self.url = told[1], told[2]

    def _greeting(self) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        said = self.log.read_text()
        return said if "Ctrl-C ends it: " in said else None

    def figure(self, name: str) -> float:
        """A figure of /metrics, summed over its labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        values = [line.split()[-1] for line in lines if re.match(rf"{re.escape(name)}[ {{]", line)]
        assert values, f"there is no figure {name}"
        return sum(map(float, values))


@contextlib.contextmanager
def pagefleet_serve(folder: Path, *options: str, **environment: str) -> Iterator[Serving]:
    """Serve on a free port; its log lies in `folder`."""
    log = folder / "log"
    command = [str(Path(sys.executable).parent / "pagefleet"), "serve", "--port=0", *options]
    with (
        log.open("w") as file,
        killed_in_the_end(
            subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )
        ) as process,
    ):
        try:
            yield Serving(process, log)
        finally:
            process.terminate()
            process.wait(END_SECONDS)
