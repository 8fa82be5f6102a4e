"""What the launcher says: lines about its processes, and texts for the user."""

from pagefleet.writer import STDERR, STDOUT, put


def say(name: str, text: str) -> None:
    """Write one line to standard error, marked with the process it is about."""
    put(STDERR, f"{name:>11} | {text}\n")


def announce(text: str) -> None:
    """Write a text to standard output."""
    put(STDOUT, text + "\n")
