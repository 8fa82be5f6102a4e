"""Runs a command that dies with its parent: `python tether.py PARENT COMMAND ...`, or `tethered`.

Linux sends a process the signal that it asked for with PR_SET_PDEATHSIG (prctl(2)) when the thread
that forked it ends, for whatever reason; the request survives execve. It must be made in the child,
and comes too late if the parent has died by then: so the parent's pid is compared afterwards. This
is a program of its own because code between fork and exec (`preexec_fn`) is not safe in every
parent.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def tethered(command: Sequence[str]) -> list[str]:
    """The command that runs `command` (an executable's path and its arguments) as a child that dies
    with the thread of this process that starts it.
    """
    return [sys.executable, "-SP", __file__, str(os.getpid()), *command]


def run_tethered(parent: int, command: list[str]) -> NoReturn:
    """Become `command`, to be killed as soon as the process `parent` is gone.

    Raises:
        OSError: the kernel refused, or the command cannot be executed.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    os.execv(command[0], command)


if __name__ == "__main__":
    run_tethered(int(sys.argv[1]), sys.argv[2:])
