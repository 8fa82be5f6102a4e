"""`python -m pagefleet_scheduler`: one scheduler process."""

import resource
import sys

from pagefleet.cell_key import CellKeyError
from pagefleet.command_line import parse, refuse
from pagefleet.endpoint import EndpointError
from pagefleet.observe import configure_logging
from pagefleet.settings import SchedulerSettings
from pagefleet_scheduler.server import Server


def main() -> None:
    """Run until told to stop."""
    settings = parse(SchedulerSettings, sys.argv[1:], prog="pagefleet scheduler")
    configure_logging("scheduler")
    if settings.cell_key is not None:
        _use_all_descriptors()
    try:
        Server(settings).run()
    except (EndpointError, CellKeyError) as error:
        refuse("pagefleet scheduler", error)


def _use_all_descriptors() -> None:
    """As many as the system allows: strangers on the network may take some for seconds."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
