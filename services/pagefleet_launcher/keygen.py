"""`pagefleet keygen FILE`: the key of a cell that spans machines (`pagefleet.cell_key`)."""

import argparse
import sys
from collections.abc import Sequence

from pagefleet import cell_key
from pagefleet_launcher.showing import show


def main(argv: Sequence[str]) -> int:
    """Write the file; returns the status to exit with."""
    file = _parser().parse_args(argv).file
    try:
        cell_key.make(file)
    except cell_key.CellKeyError as error:
        print(f"pagefleet keygen: {error}", file=sys.stderr)
        return 1
    show(
        f"{file} is the key of a new cell. Whoever has a copy belongs to the cell, so copy it to "
        f"the other machines in secret (scp -p), and start everything with --cell-key={file}."
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagefleet keygen",
        description="Makes the key under which the machines of a cell talk.",
        allow_abbrev=False,
    )
    parser.add_argument("file", help="a file that does not exist yet")
    return parser
