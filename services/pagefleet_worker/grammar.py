"""Guides: which tokens a request's grammar lets come next.

A grammar is compiled once, in a thread of its own that begins when a slot is opened, so that it is
ready when the prompt is computed. Each slot has its place in it (`Guided`), which is nothing but a
function of the slot's outputs: it follows them as they grow, goes back where drafts were dropped,
and is built again from all of them when a slot is opened or forked. So a guided stream survives
whatever its slot does not.

The library is llguidance (Earley parser over derivatives of regular expressions; lexer states made
as they are met). `benchmarks/structured.py` compares it with xgrammar on a vocabulary of 49,152:
xgrammar's masks are cheaper (1 to 17 against 5 to 98 microseconds in the median), because it
prepares them when it compiles, which takes 3 to 33 ms for schemas, regexes and choices where
llguidance takes 0.3 to 1.5; with the masks of a whole text, llguidance needs less in five of six.
It also bounds the work of a hostile grammar by fuel, counted and not timed, needs neither torch nor
transformers, so that the gateway refuses exactly what the worker would, and lets go of the GIL.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pagefleet.manifest import TOKENIZER_FILE, Manifest
from pagefleet.params import MAX_FORCED_BYTES, MAX_GRAMMAR_ITEMS, Guide
from pagefleet.wire import Open

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 64
"""Grammars that are remembered; the one that was not used for longest goes first."""
MAX_COMPILED_CHARACTERS = 1 << 17
"""Of them together, but for the newest: each may take 400 bytes (a long literal)."""

_MAX_REASON = 300


class GuideError(Exception):
    """A grammar that cannot be compiled, that takes too much work, or that was not obeyed."""


class DisobeyedError(GuideError):
    """Outputs that the grammar does not allow: they were not chosen under it."""


class Guided:
    """One sequence's place in a grammar, after those of its outputs that are the grammar's.

    An end of sequence behind a text that is complete anyhow is none of them.
    """

    def __init__(self, matcher: "LLMatcher", ends: Sequence[int], to_end: bool) -> None:
        self._matcher = matcher
        self._ends = ends
        self._to_end = to_end
        self._taken = array("i")

    def __repr__(self) -> str:
        return f"<Guided after {len(self._taken)} tokens, {self._matcher.stop_reason()}>"

    def mask(self, outputs: "array[int]") -> bytes:
        """The tokens that may follow `outputs`: bit i, little-endian, is set for token i.

        Only ends of sequence may follow a complete text.

        Raises:
            DisobeyedError: the grammar does not allow `outputs`.
            GuideError: it takes too much work.
        """
        self._follow(outputs)
        if len(self._matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
            raise GuideError(f"the grammar forces more than {MAX_FORCED_BYTES} bytes in a row")
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _failure(self._matcher)
        return self._without_ends(mask) if self._to_end else mask

    def _follow(self, outputs: "array[int]") -> None:
        matcher, taken = self._matcher, self._taken
        if outputs[: len(taken)] != taken:
            common = next(i for i, t in enumerate(taken) if outputs[i : i + 1] != array("i", [t]))
            matcher.rollback(len(taken) - common)
            del taken[common:]
        rest = outputs[len(taken) :]
        count = matcher.try_consume_tokens(rest.tolist())
        taken.extend(rest[:count])
        if matcher.is_error():
            raise _failure(matcher)
        if any(token not in self._ends for token in rest[count:]):
            raise DisobeyedError(f"the grammar does not allow token {rest[count]} where it stands")

    def _without_ends(self, mask: bytes) -> bytes:
        others = bytearray(mask)
        for token in self._ends:
            others[token >> 3] &= ~(1 << (token & 7))
        return bytes(others) if any(others) else mask


class Grammars:
    """Compiles the guides of requests for one tokenizer, which `build` makes when it is needed.

    ends: tokens that end a sequence.
    """

    def __init__(self, build: "Callable[[], LLTokenizer]", ends: Sequence[int]) -> None:
        self._build = build
        self._ends = ends
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def __repr__(self) -> str:
        done = sum(each.done() for each in self._compiled.values())
        return f"<Grammars: {done} of {len(self._compiled)} compiled>"

    @classmethod
    def load(cls, folder: Path, manifest: Manifest) -> Self:
        """Over the tokenizer of a prepared model."""

        def build() -> "LLTokenizer":
            from llguidance import LLTokenizer

            file, ends = str(folder / TOKENIZER_FILE), list(manifest.eos_token_ids)
            return LLTokenizer(file, n_vocab=manifest.vocab_size, eos_token=ends)

        return cls(build, manifest.eos_token_ids)

    def prepare(self, guide: Guide) -> "Future[LLMatcher]":
        """Begin to compile a guide, unless it is remembered."""
        compiled = self._compiled.get(guide.grammar)
        if compiled is None:
            compiled = self._thread.submit(self._compile, guide.grammar)
            self._compiled[guide.grammar] = compiled
            self._forget()
        self._compiled.move_to_end(guide.grammar)
        return compiled

    def _forget(self) -> None:
        characters = sum(map(len, self._compiled))
        while len(self._compiled) > MAX_COMPILED or (
            characters > MAX_COMPILED_CHARACTERS and len(self._compiled) > 1
        ):
            grammar, _ = self._compiled.popitem(last=False)
            characters -= len(grammar)

    def prepare_all(self, opens: Iterable[Open]) -> None:
        """Begin to compile the guides of slots that are opened."""
        for order in opens:
            if order.params.guide is not None:
                self.prepare(order.params.guide)

    def begin(self, guide: Guide) -> Guided:
        """A place at the start of a guide's grammar; waits until it is compiled.

        Raises:
            GuideError: it cannot be compiled.
        """
        return Guided(self.prepare(guide).result().deep_copy(), self._ends, guide.to_end)

    def warm_up(self) -> None:
        """Make the tokenizer now: at the first guide, it would hold the GIL for up to a second."""
        with suppress(GuideError):
            self._thread.submit(self._made_tokenizer).result()

    def _made_tokenizer(self) -> "LLTokenizer":
        if self._tokenizer is None:
            try:
                self._tokenizer = self._build()
            except ValueError as error:
                raise GuideError(f"the model's tokenizer cannot be guided: {error}") from error
        return self._tokenizer

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(step_max_items=MAX_GRAMMAR_ITEMS)
        matcher = LLMatcher(self._made_tokenizer(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _failure(matcher)
        return matcher


def _no_tokenizer() -> "LLTokenizer":
    raise GuideError("this worker has no tokenizer, and cannot guide")


NO_GRAMMARS = Grammars(_no_tokenizer, ())
"""Of an engine without a tokenizer: it refuses every guide."""


def _failure(matcher: "LLMatcher") -> GuideError:
    """What went wrong, without the dump of the parser's state that follows."""
    reason = matcher.get_error().partition("\n<state>")[0].strip()
    return GuideError(f"the grammar cannot be followed: {reason[:_MAX_REASON]}")
