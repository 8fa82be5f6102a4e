"""What the other commands show their user on standard output, waiting for it to be read."""

import os
from errno import EPIPE
from signal import SIGPIPE

from pagefleet.writer import STDOUT

UNREAD_STATUS = 128 + SIGPIPE
"""The status that a shell gives a program that ends because nobody reads it any more."""


class ShowingError(Exception):
    """Standard output cannot be written to; says why.

    unread: because its reader is gone, as is usual with pipes.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written to: {error.strerror}")
        self.unread = error.errno == EPIPE


def show(text: str, end: str = "\n") -> None:
    """Show a text at once.

    Raises:
        ShowingError: it cannot be written.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # for what Python has left to write
        raise ShowingError(error) from error
