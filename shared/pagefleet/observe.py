"""What the services say about themselves: a line for each fact, on standard error."""

import logging
import sys

from pagefleet.writer import take_standard_error


def configure_logging(service: str, level: int = logging.INFO) -> None:
    """Log to standard error as `time level service: message`.

    From now on, nothing that is written to `sys.stderr` waits for its reader (writer.py).
    """
    take_standard_error()
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"%(asctime)s %(levelname)s {service}: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
