"""Parts of what the scheduler sends: outputs and logprobs cut at a token, and their sizes."""

from collections.abc import Iterator

import msgspec

from pagefleet.wire import Logprobs, Output, PromptOutput, Rejected

_ITEM_BYTES = 64
"""That an item is worth, however little it brings."""


def size(item: Output | PromptOutput | Rejected) -> int:
    """About how many bytes are to be made into text."""
    logprobs = None if isinstance(item, Rejected) else item.logprobs
    tokens = len(item.tokens) if isinstance(item, Output) else 0
    return _ITEM_BYTES + tokens + (len(logprobs.top_ids) + len(logprobs.top) if logprobs else 0)


def count(logprobs: Logprobs) -> int:
    """Tokens that logprobs speak of."""
    return len(logprobs.chosen) // 4


def sliced(logprobs: Logprobs, start: int, end: int) -> Logprobs:
    """Those of the tokens from `start` to before `end`."""
    tokens = count(logprobs)
    if start == 0 and end >= tokens:
        return logprobs
    width = len(logprobs.top) // max(tokens, 1)
    return Logprobs(
        logprobs.chosen[4 * start : 4 * end],
        logprobs.top_ids[width * start : width * end],
        logprobs.top[width * start : width * end],
    )


def parted(output: Output, tokens: int) -> tuple[Output, Output]:
    """The first `tokens` tokens of an output, which do not end it, and all that follows."""
    cut, logprobs = 4 * tokens, output.logprobs
    first = msgspec.structs.replace(
        output,
        tokens=output.tokens[:cut],
        logprobs=logprobs and sliced(logprobs, 0, tokens),
        finish=None,
    )
    rest = msgspec.structs.replace(
        output,
        position=output.position + tokens,
        tokens=output.tokens[cut:],
        logprobs=logprobs and sliced(logprobs, tokens, len(output.tokens)),
    )
    return first, rest


def one_by_one(output: Output) -> Iterator[Output]:
    """Its tokens each by itself; the last has its end."""
    last = max(len(output.tokens) // 4, 1) - 1
    if last == 0:
        yield output
        return
    for number in range(last + 1):
        yield msgspec.structs.replace(
            output,
            position=output.position + number,
            tokens=output.tokens[4 * number : 4 * number + 4],
            logprobs=output.logprobs and sliced(output.logprobs, number, number + 1),
            finish=output.finish if number == last else None,
        )
