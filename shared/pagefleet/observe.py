"""What the services say of themselves: one line a fact, on standard error."""

import logging
import sys

from pagefleet.writer import take_standard_error


def configure_logging(service: str, level: int = logging.INFO) -> None:
    """Log to standard error as `time level service: message`; prompts and answers never are.

    From here on nothing that is written to `sys.stderr` waits for its reader (writer.py).
    """
    take_standard_error()
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"%(asctime)s %(levelname)s {service}: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
