"""What attention on the CPU has to do in a step, cut into tasks, in an order that follows from the
rows alone: each thread finds its next task by counting.
"""

from typing import Any, NamedTuple

from pagefleet_kernels.cpu_ir import device
from pagefleet_kernels.cpu_simd import load_int32
from pagefleet_kernels.cpu_tiles import TILE


class Task(NamedTuple):
    """Some tokens of a row, over some tiles of its context."""

    row: int
    token: int
    """First token, counted over the step."""
    tokens: int
    position: int
    """Of the first token, in its sequence."""
    first_tile: int
    last_tile: int


class Cursor(NamedTuple):
    """A place in the list of tasks. Their order follows from the rows alone: a row of one token has
    a task for each tile; another has one for each head and some of its tokens, the last tokens
    first, because they see most.
    """

    row: int
    begin: int
    """Number of the row's first task."""
    tasks: int
    """How many the row has."""
    partials: int
    """Where the states of the row's tiles go, if it has one token."""
    decode: bool
    """Whether the row has one token."""
    part: int
    """Number of the tile among those of the row if it has one token, else of the head."""
    task: Task


@device
def seek(arguments: Any, cursor: Cursor, number: int) -> Cursor:
    """The place of task `number`, at or after `cursor`; past the last row, a task of no tokens."""
    row, begin, partials = cursor.row, cursor.begin, cursor.partials
    heads, step, window = arguments.heads, arguments.tokens_per_task, arguments.window
    while row < arguments.rows:
        token = load_int32(arguments.offsets + row * 4)
        tokens = load_int32(arguments.offsets + row * 4 + 4) - token
        start = load_int32(arguments.starts + row * 4)
        low = max(start + 1 - window, 0) // TILE if window else 0
        count = -(-(start + 1) // TILE) - low if tokens == 1 else -(-tokens // step) * heads
        if number < begin + count:
            if tokens == 1:
                tile = low + number - begin
                task = Task(row, token, 1, start, tile, tile + 1)
                return Cursor(row, begin, count, partials, True, number - begin, task)
            skipped = (begin + count - 1 - number) // heads * step
            size, position = min(tokens - skipped, step), start + skipped
            low = max(position + 1 - window, 0) // TILE if window else 0
            task = Task(row, token + skipped, size, position, low, -(-(position + size) // TILE))
            return Cursor(row, begin, count, partials, False, (number - begin) % heads, task)
        if tokens == 1:
            partials += count * arguments.partial_size
        begin += count
        row += 1
    return Cursor(row, begin, 0, partials, False, 0, Task(row, 0, 0, 0, 0, 0))
