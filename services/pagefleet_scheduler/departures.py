"""Streams whose readers have gone, but may come back through any gateway.

A client whose stream broke asks a gateway to continue it, and `Submit.continues` names the earlier
request. That may still be open, because its gateway is alive, or not yet known to be dead: then it
moves to the new gateway, whatever it is doing, and the old one is told so whenever it mentions the
request. Or it ended with its gateway or client: then its tokens, not its blocks, are kept for
`KEEP_SECONDS`.

All this is a cache: without it the same stream is generated again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pagefleet_scheduler.sequence import Request, Sequence

KEEP_SECONDS = 30.0
"""For which tokens are kept, and requests that moved are remembered."""

KEPT_TOKENS = 4_000_000
"""Tokens of prompts and outputs to keep at most; a logprob counts as one. The oldest go first."""


@dataclass(frozen=True, slots=True)
class _Kept:
    request: Request
    outputs: Mapping[int, Sequence]
    until: float
    size: int


@dataclass(frozen=True, slots=True)
class _Move:
    id: str
    until: float


class Departures:
    """Requests that lately were left, or moved; by their ids, oldest first."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._moves: dict[str, _Move] = {}
        self._size = 0

    def __repr__(self) -> str:
        return f"<Departures {len(self._kept)} kept, {self._size} tokens, {len(self._moves)} moved>"

    def keep(self, request: Request, now: float) -> None:
        """Keep the outputs of a request that is about to be forgotten, if they can be repeated.

        Only streams have a window, and only they are resumed.
        """
        if not request.window or not repeatable(request):
            return
        known = request.finished | request.sequences
        outputs = {
            choice: Sequence(
                request,
                [choice],
                sequence.tokens[:],
                logprobs=sequence.logprobs[:],
                numerics=sequence.numerics,
                cached=sequence.cached,
                finish=sequence.finish,
            )
            for choice, sequence in known.items()
            if sequence.outputs
        }
        if not outputs:
            return
        self._drop(request.id)
        size = sum(_size(sequence) for sequence in outputs.values())
        self._kept[request.id] = _Kept(request, outputs, now + KEEP_SECONDS, size)
        self._size += size
        while self._size > KEPT_TOKENS:
            self._drop(next(iter(self._kept)))

    def take(self, id: str, request: Request) -> list[Sequence]:
        """Take the outputs of a request that was left, for one that asks for the same tokens."""
        kept = self._kept.get(id)
        if kept is None or not same(kept.request, request):
            return []
        self._drop(id)
        return list(kept.outputs.values())

    def move(self, id: str, to: str, now: float) -> None:
        """Remember that a request, which has not moved before, goes on under the id `to`."""
        self._moves[id] = _Move(to, now + KEEP_SECONDS)

    def has_moved(self, id: str) -> bool:
        """Whether a request goes on under another id."""
        return id in self._moves

    def latest(self, id: str) -> str:
        """The id under which a request goes on by now; its own if it never moved."""
        while (move := self._moves.get(id)) is not None:
            id = move.id
        return id

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._drop(next(iter(self._kept)))
        while self._moves and next(iter(self._moves.values())).until <= now:
            del self._moves[next(iter(self._moves))]

    def _drop(self, id: str) -> None:
        if (kept := self._kept.pop(id, None)) is not None:
            self._size -= kept.size

    def check(self) -> None:
        """Assert the invariants."""
        assert self._size == sum(kept.size for kept in self._kept.values()) <= KEPT_TOKENS
        assert all(self.latest(id) != id for id in self._moves)


def same(request: Request, other: Request) -> bool:
    """Whether two requests ask for the same tokens, of the same tenant."""
    return (request.prompt, request.params, request.salt) == (
        other.prompt,
        other.params,
        other.salt,
    )


def repeatable(request: Request) -> bool:
    """Whether all outputs so far can be sent from the first on, with logprobs if wanted."""
    known = [*request.finished.values(), *request.sequences.values()]
    whole = request.params.logprobs is None or not any(sequence.base for sequence in known)
    return whole and request.params.prompt_logprobs is None


def can_move(request: Request, to: Request, choices: set[int]) -> bool:
    """Whether an open request can go on as `to`, which wants these choices."""
    if request.search is not None:
        return same(request, to) and choices <= request.answers.keys()
    known = request.finished.keys() | request.sequences.keys()
    return same(request, to) and repeatable(request) and choices <= known


def _size(sequence: Sequence) -> int:
    pieces = sequence.logprobs
    return len(sequence.tokens) + sum(len(each.chosen) + 2 * len(each.top) for each in pieces) // 4
