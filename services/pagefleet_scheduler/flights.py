"""Steps that are under way: what was ordered, kept until the result is there."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from pagefleet.wire import Floats, Logprobs, Plan, PromptLogprobs, Result, unpack_ints
from pagefleet_scheduler.prompt_lookup import Drafts
from pagefleet_scheduler.sequence import Sequence


class ResultError(Exception):
    """A result that does not fit its plan: the worker cannot be trusted any more."""


class PlannedRow(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of a row until its result comes."""

    sequence: Sequence
    run: int
    end: int
    samples: int
    ahead: bool
    """The sequence counts the sample as its next token although it is not back."""
    drafts: Drafts
    """Fed on trial at the end of the row."""


@dataclass(slots=True)
class Flight:
    """A step that is under way."""

    plan: Plan
    rows: list[PlannedRow]
    sent: float = 0.0
    repeated: bool = False
    result: Result | None = None
    """If it came before that of an earlier step."""
    tokens: int = field(init=False)
    """Input tokens."""
    samples: int = field(init=False)
    """Tokens that it gives."""

    def __post_init__(self) -> None:
        """Count tokens and samples."""
        self.tokens = len(self.plan.tokens) // 4
        self.samples = sum(row.samples for row in self.rows)

    @property
    def samples_all(self) -> bool:
        """Whether there is a sample for each input token, so that no prompt is computed."""
        return self.tokens == self.samples

    def samples_of(self, result: Result) -> "tuple[array[int], list[Logprobs | None]]":
        """The tokens that were sampled, row by row, and their logprobs.

        Raises:
            ResultError: the result is not this step's, or does not fit its rows.
        """
        tokens = unpack_ints(result.tokens)
        if self.plan.step != result.step:
            raise ResultError(f"step {result.step} is not the one that is awaited")
        if len(tokens) != self.samples:
            raise ResultError(f"step {result.step} gave {len(tokens)} samples, not as ordered")
        if any(not 0 <= piece.row < len(self.rows) for piece in result.prompts):
            raise ResultError(f"step {result.step} has logprobs of a row that it does not have")
        return tokens, list(map(dict(result.logprobs).get, range(self.samples)))


def keep(result: Result, flights: Iterable[Flight]) -> None:
    """Keep a result with its step until those of earlier steps are there.

    Raises:
        ResultError: it answers none of the steps.
    """
    for flight in flights:
        if flight.plan.step == result.step:
            flight.result = result
            return
    raise ResultError(f"step {result.step} was not ordered")


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """What a step gave one sequence."""

    sequence: Sequence
    tokens: "array[int]"
    """One for each of several choices, or of one choice tokens that follow each other."""
    logprobs: list[Logprobs | None]


@dataclass(slots=True)
class Accepted:
    """What a step gave all of its sequences."""

    sampled: list[Sampled] = field(default_factory=list)
    prompts: list[tuple[Sequence, PromptLogprobs]] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)
    completed: dict[Sequence, Floats | None] = field(default_factory=dict)
    """Sequences that only wanted their prompt computed, with its embedding if that was wanted."""


def agreeing(drafts: "array[int]", samples: "array[int]") -> int:
    """How many drafts are confirmed: the model sampled the very tokens that were fed."""
    for number, (draft, sample) in enumerate(zip(drafts, samples, strict=False)):
        if draft != sample:
            return number
    return len(drafts)
