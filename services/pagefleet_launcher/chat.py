"""`pagefleet chat`: talk to a running cell from a terminal.

Ctrl-C ends an answer, Ctrl-D the chat. Standard input may also be a pipe: each line is a question.
An answer goes on if its gateway dies. If the cell asks for keys, PAGEFLEET_API_KEY has to be one.
"""

import argparse
import contextlib
import readline  # noqa: F401 (input() then edits lines, and remembers them)
import sys
from collections.abc import Sequence

from pagefleet_launcher.asking import DEFAULT_URL, gateway_url
from pagefleet_launcher.conversation import Chat, ChatError, Message, first_model
from pagefleet_launcher.showing import show


def main(argv: Sequence[str]) -> int:
    """Chat; returns the status to exit with."""
    given = vars(_parser().parse_args(argv))
    url, system = given.pop("url"), given.pop("system")
    options = {name: value for name, value in given.items() if value is not None}
    try:
        chat = Chat(url, options.pop("model", "") or first_model(url), options)
    except ChatError as error:
        print(f"pagefleet chat: {error}", file=sys.stderr)
        return 1
    if system is not None:
        chat.messages.append(Message("system", system))
    return _talk(chat)


def _talk(chat: Chat) -> int:
    """Questions and answers until there are no more; the status is the last answer's."""
    status = 0
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            if question := input(prompt).strip():
                status = int(not _answered(chat, question))
    return status


def _answered(chat: Chat, question: str) -> bool:
    """Print the answer; returns whether it came to its end, or was ended by Ctrl-C."""
    with contextlib.closing(chat.ask(question)) as pieces:
        try:
            for piece in pieces:
                show(piece, end="")
        except KeyboardInterrupt:
            pass
        except ChatError as error:
            print(f"\npagefleet chat: {error}", file=sys.stderr)
            return False
    show("")
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagefleet chat", description=(__doc__ or "").partition("\n\n")[2], allow_abbrev=False
    )
    add = parser.add_argument
    add("--url", type=gateway_url, default=DEFAULT_URL, help="of a gateway (default: %(default)s)")
    add("--model", help="its name (default: the one that is served)")
    add("--system", metavar="TEXT", help="what the model is told before the chat")
    add("--max-tokens", type=int, metavar="N", help="of an answer (default: as many as fit)")
    add(
        "--temperature",
        type=float,
        metavar="T",
        help="0 to 2; 0 takes the likeliest tokens (default: what the model's authors recommend)",
    )
    return parser
