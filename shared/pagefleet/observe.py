"""What the services say of themselves: one line a fact, on standard error."""

import logging
import sys


def configure_logging(service: str, level: int = logging.INFO) -> None:
    """Log to standard error as `time level service: message`; prompts and answers never are."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"%(asctime)s %(levelname)s {service}: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
