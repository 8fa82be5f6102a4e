"""The `pagefleet` command."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from pagefleet_launcher import chat, keygen, serve, tap, top
from pagefleet_launcher.commands import PROGRAMS, program
from pagefleet_launcher.showing import UNREAD_STATUS, ShowingError, show

USAGE = """\
usage: pagefleet COMMAND [OPTIONS]

  serve      a whole cell on this machine: gateway, scheduler and workers, supervised
  gateway    one gateway: HTTP in, text to tokens and back
  scheduler  the scheduler: decides what every worker computes next
  worker     one worker: a model and its pool of KV blocks
  prepare    fetch and prepare a model beforehand, and print the folder for --model
  keygen     make the key of a cell that spans machines
  chat       talk to a running cell
  tap        what the processes of a running cell say to each other
  top        how the memory of a running cell is used, and who waits for it

pagefleet COMMAND --help shows a command's options; those of serve, gateway, scheduler and worker
can be set by environment variables too. pagefleet --version shows the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or become the program that it names; returns the status to exit with."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except ShowingError as error:
        if error.unread:
            return UNREAD_STATUS
        print(f"pagefleet: {error}.", file=sys.stderr)
        return 1


def _run(argv: Sequence[str]) -> int:
    match argv:
        case ["serve", *arguments]:
            return serve.main(arguments)
        case ["chat", *arguments]:
            return chat.main(arguments)
        case ["keygen", *arguments]:
            return keygen.main(arguments)
        case ["tap", *arguments]:
            return tap.main(arguments)
        case ["top", *arguments]:
            return top.main(arguments)
        case [name, *arguments] if name in PROGRAMS:
            command = program(name, arguments)
            os.execv(command[0], command)
        case ["-h" | "--help"]:
            show(USAGE, end="")
            return 0
        case ["--version"]:
            show(f"pagefleet {version('pagefleet')}")
            return 0
        case [name, *_]:
            print(f"pagefleet: there is no command {name!r}.\n\n{USAGE}", end="", file=sys.stderr)
        case _:
            print(USAGE, end="", file=sys.stderr)
    return 2
