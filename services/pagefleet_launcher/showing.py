"""What a command shows whoever gave it, on standard output."""

import os
from errno import EPIPE
from signal import SIGPIPE

from pagefleet.writer import STDOUT

UNREAD_STATUS = 128 + SIGPIPE
"""What a shell tells of a program that ends because nobody reads it any more."""


class ShowingError(Exception):
    """Standard output takes no more; says why.

    unread: its reader is gone, which is how many a pipe ends.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written to: {error.strerror}")
        self.unread = error.errno == EPIPE


def show(text: str, end: str = "\n") -> None:
    """Show a text, now.

    Raises:
        ShowingError: that is not possible.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # for what Python has left to write
        raise ShowingError(error) from error
