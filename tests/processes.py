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


def run_tests(*arguments: str, **environment: str) -> None:
    """Run pytest with these arguments in a process of its own, to its good end."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout


def run_interpreted(*arguments: str) -> None:
    """Run tests in Triton's interpreter.

    Triton decides at import whether its functions are compiled or interpreted, so tests that take
    its kernels for what needs no GPU have a process of their own.
    """
    run_tests(*arguments, TRITON_INTERPRET="1")
