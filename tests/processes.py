"""Processes that a test starts."""

import os
import subprocess
import sys
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


def may_mount() -> bool:
    """Whether a process may have file systems of its own here."""
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return tried.returncode == 0


def run_interpreted(*arguments: str) -> None:
    """Run pytest with these arguments in Triton's interpreter, to its good end.

    Triton decides at import whether its functions are compiled or interpreted, so tests that take
    its kernels for what needs no GPU have a process of their own.
    """
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
