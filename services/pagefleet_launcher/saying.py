"""What `pagefleet serve` says, without waiting for its reader: lines about processes, and texts."""

from pagefleet.writer import STDERR, STDOUT, put


def say(name: str, text: str) -> None:
    """Write one line to standard error, marked with the process it is about."""
    put(STDERR, f"{name:>11} | {text}\n")


def announce(text: str) -> None:
    """Write a text for the user to standard output."""
    put(STDOUT, text + "\n")
