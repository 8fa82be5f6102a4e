"""`pagefleet top`: how the memory of a running cell is used, and who waits for it.

On a terminal it is updated every second until Ctrl-C; otherwise it is shown once, as plain text.
`--blocks` adds a map of every pool, with a character for each block: `.` free, `c` cached, else how
many sequences have it in their tables (`+`: ten or more). If the cell asks for keys,
PAGEFLEET_API_KEY has to be one with `admin = true`.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence

import msgspec

from pagefleet.writer import STDOUT
from pagefleet_launcher.asking import (
    BROKEN,
    DEFAULT_URL,
    Refused,
    Unanswered,
    ask,
    gateway_url,
)
from pagefleet_launcher.showing import show

SECONDS = 1.0
"""Between two looks."""

MAP_WIDTH = 96

CLEAR = "\033[H\033[J"

REASONS = {
    "worker": "no worker has joined",
    "larger_worker": "no worker's pool can hold it",
    "client": "its client has not taken what it has",
    "result": "a step that it took part in is not back",
    "turn": "others go first",
    "slot": "every slot is taken",
    "blocks": "wants {wanted} blocks, {available} are there",
}


class Pool(msgspec.Struct):
    """One worker, as the gateway's `/memory` tells."""

    engine: int
    running: int
    slots: int
    blocks: int
    block_size: int
    free: int
    cached: int
    holders: dict[int, int]
    """How many blocks are in the tables of one sequence, of two, ..."""
    empty_slots: int
    copies: int
    preemptions: int
    swapped_out: int
    swapped_in: int
    map: str

    @property
    def sharing(self) -> str:
        """How many blocks are held by how many sequences, where these are several."""
        shared = [f"{count} by {n}" for n, count in self.holders.items() if n > 1]
        return ", ".join(shared) or "-"

    @property
    def waste(self) -> float:
        """Share of the held slots that hold no token."""
        held = sum(self.holders.values()) * self.block_size
        return self.empty_slots / held if held else 0.0


class Waiting(msgspec.Struct):
    """One sequence that waits, as the gateway's `/memory` tells."""

    request: str
    choices: list[int]
    seconds: float
    tokens: int
    losses: int
    reason: str
    wanted: int
    available: int

    @property
    def why(self) -> str:
        """The reason in words; one of a newer gateway by its name."""
        return REASONS.get(self.reason, self.reason).format(
            wanted=self.wanted, available=self.available
        )


class Memory(msgspec.Struct):
    """What a gateway's `/memory` tells."""

    workers: list[Pool]
    waiting: list[Waiting]


def main(argv: Sequence[str]) -> int:
    """Show memory; returns the status to exit with."""
    options = _parser().parse_args(argv)
    screen = os.isatty(STDOUT)
    try:
        while True:
            text = render(fetch(options.url, options.blocks), options.rows)
            show(CLEAR * screen + text)
            if not screen:
                return 0
            time.sleep(SECONDS)
    except KeyboardInterrupt:
        return 0
    except (Refused, Unanswered) as error:
        print(f"pagefleet top: {error}", file=sys.stderr)
    except (ValueError, *BROKEN) as error:
        print(f"pagefleet top: {options.url} does not tell: {error}", file=sys.stderr)
    return 1


def fetch(url: str, blocks: bool) -> Memory:
    """Ask a gateway.

    Raises:
        Refused: it answers with an error.
        Unanswered: it does not answer.
        ValueError: the answer is not what was asked for.
        OSError, HTTPException: the answer breaks off.
    """
    with ask(url, f"/memory?blocks={str(blocks).lower()}") as response:
        return msgspec.json.decode(response.read(), type=Memory)


def render(memory: Memory, rows: int) -> str:
    """Tables, and maps if there are any; at most `rows` of the sequences that wait."""
    parts = [_table(_WORKER_COLUMNS, map(_worker_cells, memory.workers))]
    for pool in memory.workers:
        if pool.map:
            lines = [pool.map[at : at + MAP_WIDTH] for at in range(0, len(pool.map), MAP_WIDTH)]
            parts.append("\n".join([f"blocks of worker {pool.engine}", *lines]))
    if memory.waiting:
        parts.append(_table(_WAITING_COLUMNS, map(_waiting_cells, memory.waiting[:rows])))
    if len(memory.waiting) > rows:
        parts.append(f"and {len(memory.waiting) - rows} more wait")
    return "\n\n".join(parts)


_WORKER_COLUMNS = (
    *("worker", "running", "blocks", "free", "cached", "held by 1", "shared"),
    *("empty slots", "copies", "preempted", "swapped out", "in"),
)

_WAITING_COLUMNS = ("waiting", "choices", "seconds", "tokens", "losses", "why")


def _worker_cells(pool: Pool) -> Sequence[str]:
    figures = (pool.copies, pool.preemptions, pool.swapped_out, pool.swapped_in)
    return [
        *(str(pool.engine), f"{pool.running}/{pool.slots}"),
        *map(str, (pool.blocks, pool.free, pool.cached, pool.holders.get(1, 0))),
        *(pool.sharing, f"{pool.empty_slots} ({pool.waste:.1%})"),
        *map(str, figures),
    ]


def _waiting_cells(each: Waiting) -> Sequence[str]:
    return [
        each.request,
        ",".join(map(str, each.choices)),
        f"{each.seconds:.1f}",
        str(each.tokens),
        str(each.losses),
        each.why,
    ]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagefleet top", description=(__doc__ or "").partition("\n\n")[2], allow_abbrev=False
    )
    add = parser.add_argument
    add("--url", type=gateway_url, default=DEFAULT_URL, help="of a gateway (default: %(default)s)")
    add("--blocks", action="store_true", help="draw a map of every pool")
    add("--rows", type=int, default=20, help="waiting sequences to show, at most (%(default)s)")
    return parser
