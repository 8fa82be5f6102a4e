"""How a process that computes ends: at once, when it has nothing more to say.

An interpreter takes itself down step by step, and what it meets there may wait in vain: NCCL for
ranks that have ended and for graphs that still hold its operations, a kernel for its threads.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from pagefleet import writer

log = logging.getLogger("pagefleet_worker")


def run_to_end(main: Callable[[], None]) -> NoReturn:
    """Do `main`, then end the process with the status of its SystemExit, 1 if it failed, or as
    shells tell it if Ctrl-C ended it.
    """
    status = 0
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except Exception:
        log.exception("this process fails")
        status = 1
    end_now(status)


def end_now(status: int) -> NoReturn:
    """End the process from any of its threads."""
    writer.flush()
    sys.stdout.flush()
    os._exit(status)
