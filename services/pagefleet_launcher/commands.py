"""How each service is started: as `python -m`, with the interpreter that runs the launcher.

The launcher knows the services by these names only and imports none of them.
"""

import sys
from collections.abc import Sequence

SERVICES = {
    "gateway": "pagefleet_gateway",
    "scheduler": "pagefleet_scheduler",
    "worker": "pagefleet_worker",
}

PROGRAMS = {**SERVICES, "prepare": "pagefleet_worker.prepare"}
"""The module that a command of that name becomes."""


def program(name: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs the program `name` with `arguments`."""
    return [sys.executable, "-m", PROGRAMS[name], *arguments]
