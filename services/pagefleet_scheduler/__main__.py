"""`python -m pagefleet_scheduler`: one scheduler process."""

import sys

from pagefleet.observe import configure_logging
from pagefleet.settings import SchedulerSettings, parse, refuse
from pagefleet.transport import EndpointError
from pagefleet_scheduler.server import Server


def main() -> None:
    """Run until told to stop."""
    settings = parse(SchedulerSettings, sys.argv[1:], prog="pagefleet scheduler")
    configure_logging("scheduler")
    try:
        server = Server(settings)
    except EndpointError as error:
        refuse("pagefleet scheduler", error)
    server.run()


if __name__ == "__main__":
    main()
