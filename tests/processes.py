"""Processes that a test starts."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import AnyStr


@contextmanager
def killed_in_the_end(
    process: "subprocess.Popen[AnyStr]",
) -> "Iterator[subprocess.Popen[AnyStr]]":
    """Whatever happens to the test, the process does not outlive it."""
    with process:
        try:
            yield process
        finally:
            process.kill()
