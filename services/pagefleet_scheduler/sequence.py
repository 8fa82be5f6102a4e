"""What the scheduler knows about a request: its choices, and the sequences that produce them.

A sequence is one stream of tokens. It has no phase. Three counts say where it is, and each step
makes the later ones catch up with the earlier:

    length     tokens that it has, including those of steps whose results are not back
    ordered    positions whose keys and values some plan has ordered
    computed   positions whose result was accepted

Prefill, decode and recomputation are all "feed the positions from `ordered` to `length`". When a
sequence loses its blocks (it is preempted, its worker dies), `ordered` and `computed` return to 0,
and `run` is incremented, which tells the rows of the old run that are still under way from later
ones.
"""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pagefleet.params import SamplingParams
from pagefleet.wire import Finish, Ints, Logprobs, Numerics, checksum, pack_ints
from pagefleet_scheduler.beam import BeamSearch
from pagefleet_scheduler.blocks import BlockKey, History, root
from pagefleet_scheduler.prompt_lookup import PromptLookup

AGING = 30.0
"""Seconds of waiting that make up for one level of priority."""


class Needs(NamedTuple):
    """What must fit a worker for a request to run there."""

    prompt: int
    """Tokens of it."""
    max_tokens: int
    beams: int
    """Sequences that run side by side."""


@dataclass(slots=True, eq=False)
class Request:
    """One submitted request."""

    id: str
    attempt: int
    gateway: bytes
    """Identity of the gateway that holds the client's connection."""
    prompt: "array[int]"
    params: SamplingParams
    salt: bytes
    number: int
    """Counts requests; breaks ties between those that came at the same time."""
    arrived: float
    priority: int = 0
    """Lower goes first."""
    tenant: str = ""
    weight: float = 1.0
    """Of its tenant, whose share of the service is in proportion to it."""
    began: float | None = None
    """When it first ran; None if it never did."""
    prediction: "array[int]" = field(default_factory=lambda: array("i"))
    """Tokens that its outputs may repeat."""
    window: int = 0
    """Outputs that each choice may have beyond those it came with; 0: any number."""
    deadline: float | None = None
    sequences: "dict[int, Sequence]" = field(default_factory=dict)
    """By choices that go on; several choices share one sequence until their first token."""
    finished: "dict[int, Sequence]" = field(default_factory=dict)
    """By choices that have ended, in case the gateway misses that."""
    search: BeamSearch | None = None
    """If it is a beam search: then `sequences` are its beams, by numbers that are no choices."""
    answers: dict[int, int] = field(default_factory=dict)
    """The choices that a beam search is to answer, each with the rank of its answer."""
    prompt_logprobs_sent: int = 1
    """Position in the prompt up to which its logprobs were sent; the first token has none."""

    @property
    def needs(self) -> Needs:
        """What it may grow to, with all beams if it is a search."""
        return Needs(len(self.prompt), self.params.max_tokens, max(self.params.beam_width, 1))

    @property
    def has_run(self) -> bool:
        """Whether it ever ran, so that its client may have seen tokens."""
        return self.began is not None

    @property
    def queued(self) -> int:
        """Microseconds that it waited before it first ran; 0 if it never did."""
        return 0 if self.began is None else round(1e6 * (self.began - self.arrived))

    @property
    def turn(self) -> float:
        """Its place among its tenant's requests that never ran: arrival and priority, in s."""
        return self.arrived + AGING * self.priority

    @property
    def order(self) -> tuple[float, int]:
        """Its place among those that have run; all others come after them."""
        began = math.inf if self.began is None else self.began
        return began + AGING * self.priority, self.number

    @property
    def ordered_params(self) -> SamplingParams:
        """What a worker is told: for beams, to report the most likely tokens and choose none."""
        if self.search is None:
            return self.params
        return msgspec.structs.replace(
            self.params, temperature=0.0, logprobs=self.params.candidates
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are still to be computed."""
        return self.params.prompt_logprobs is not None and self.prompt_logprobs_sent < len(
            self.prompt
        )

    def end(self, choice: int) -> None:
        """A choice has ended; one that was aborted before is not remembered."""
        if (sequence := self.sequences.pop(choice, None)) is not None:
            self.finished[choice] = sequence


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens that runs, waits or has ended."""

    request: Request
    choices: list[int]
    """One; or several until the first token, when the sequence forks and gives each its own."""
    tokens: "array[int]"
    """The prompt and the outputs that are known."""
    logprobs: list[Logprobs] = field(default_factory=list)
    """Of the outputs since `base`, if they were asked for."""
    finish: Finish | None = None
    candidates: Logprobs | None = None
    """Of a beam: its likely next tokens, kept until all beams of the search have theirs."""

    # --- what its gateway has, and accepts ---
    base: int = 0
    """Outputs that the gateway already had when it submitted the request."""
    sent: int = 0
    """Outputs that were sent to the gateway, with those before `base`."""
    sent_before: int = 0
    """Outputs that had been sent when its last beat came; it must have them by the next."""
    allowed: int | None = None
    """Outputs that the gateway accepts for now; None: any number. `allow` sets it."""
    limit: int = field(init=False)
    """Tokens that it may have for now, the prompt included; follows from `allowed`."""

    # --- how far it is ---
    ordered: int = 0
    computed: int = 0
    ahead: int = 0
    """Samples that were ordered and are not back."""
    flying: int = 0
    """Rows whose results are not back; a sequence that waits is admitted only when all are."""
    run: int = 0
    """How often it lost its blocks."""
    cached: int = 0
    """Prompt tokens that its first run found in the prefix cache."""

    # --- its place at a worker ---
    epoch: int = 0
    """Of the worker that runs it, or ran it last."""
    numerics: Numerics = 0
    """The class of the worker that ran it last; before that, the one that its gateway named."""
    slot: int | None = None
    """At the worker that runs it; None while it waits."""
    opened: bool = False
    """Whether the worker was told of the slot."""
    table: "array[int]" = field(default_factory=lambda: array("i"))
    """Its block table."""
    checksum: int = 0
    """Of the table."""
    table_sent: int = 0
    """Entries of the table that the worker was told."""
    writable: int = 0
    """Positions from `ordered` up to here have blocks that no other table shares."""
    indexed: int = 0
    """Full blocks of this run that are in the prefix index, or whose content was there."""
    history: History = b""
    """What its next block to be indexed continues."""

    # --- what follows from its tokens, kept because it is expensive ---
    keys: dict[int, list[BlockKey]] = field(default_factory=dict)
    """Of its full blocks, as far as they were needed, by block size: workers may differ."""
    lookup: PromptLookup | None = None
    """Where its drafts come from, once some were needed."""

    # --- deaths of its workers ---
    lost: float | None = None
    """When its worker was lost; None once it has got a token since."""
    proven: bool = False
    """Whether a step of this run has given it something."""
    suspicion: int = 0
    """1 or 2: it may have ended a worker, and runs alone, 1 before 2 (`quarantine`); 0: neither."""
    crashes: float = 0.0
    """Deaths of workers since its last token while it ran alone, as `quarantine` counts them."""
    excused: int = 0
    """Deaths of workers by chance before the first of these."""

    def __post_init__(self) -> None:
        """Set the limit."""
        self.allow(self.allowed)

    def __repr__(self) -> str:
        state = self.finish or ("runs" if self.slot is not None else "waits")
        return (
            f"<Sequence {self.request.id}/{self.choices} {state}, {self.computed} computed, "
            f"{self.ordered} ordered of {self.length}, {len(self.table)} blocks>"
        )

    @property
    def order(self) -> tuple[tuple[float, int], int]:
        """Its place among sequences that have run."""
        return self.request.order, self.choices[0]

    @property
    def length(self) -> int:
        """Tokens that it has, with samples that are not back."""
        return len(self.tokens) + self.ahead

    @property
    def outputs(self) -> int:
        """How many generated tokens are known."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """How many positions can be fed now.

        0 if the last token that it may have for now is sampled already: its keys are not needed.
        """
        length = len(self.tokens) + self.ahead
        return length - self.ordered if length < self.limit else 0

    @property
    def paused(self) -> bool:
        """Whether it has all the outputs that its gateway accepts for now."""
        return len(self.tokens) >= self.limit

    def allow(self, outputs: int | None) -> None:
        """Let it have so many outputs for now; None: as many as were asked for.

        Its prompt is fed even if no outputs were asked for.
        """
        self.allowed = outputs
        most = max(self.request.params.max_tokens, 1)
        self.limit = len(self.request.prompt) + (most if outputs is None else min(most, outputs))

    @property
    def protected(self) -> bool:
        """Whether it lost its blocks before, and has got no token since."""
        return self.run > 0 and not self.proven

    def answers(self, choice: int) -> bool:
        """Whether a choice is still wanted, and this is its sequence."""
        return self.request.sequences.get(choice) is self

    @property
    def waits_for_others(self) -> bool:
        """Whether its next step depends on a result that the scheduler has to see first."""
        return len(self.choices) > 1 or self.request.search is not None

    def belongs_with(self, other: "Sequence") -> bool:
        """Whether both are beams of one search, which are preempted together."""
        return self.request is other.request and self.request.search is not None

    @property
    def may_draft(self) -> int:
        """Drafts that could all become outputs, with one more token behind them."""
        return self.limit - len(self.tokens) - 1

    @property
    def idles(self) -> bool:
        """Whether it is a beam that waits for other beams."""
        return self.request.search is not None and not self.flying and self.pending <= 0

    def full_keys(
        self,
        block_size: int,
        limit: int,
        digest: Callable[[bytes, Ints], bytes],
        tokens: "array[int]",
    ) -> list[BlockKey]:
        """Keys of the full blocks of the first `limit` of `tokens`, which begin with its own.

        `digest` is the pool's.
        """
        keys = self.keys.setdefault(block_size, [])
        count = limit // block_size
        while len(keys) < count:
            before = keys[-1].digest if keys else root(self.request.salt)
            start = len(keys) * block_size
            packed = pack_ints(tokens[start : start + block_size])
            keys.append(BlockKey(digest(before, packed), packed))
        return keys[:count]

    def append_blocks(self, blocks: list[int]) -> None:
        """Lengthen the table."""
        self.table.extend(blocks)
        self.checksum = checksum(pack_ints(blocks), self.checksum)

    def replace_block(self, index: int, block: int) -> None:
        """Replace one entry of the table."""
        self.table[index] = block
        self.checksum = checksum(pack_ints(self.table))

    def forked(self, choice: int) -> "Sequence":
        """A copy of it for one choice, with the same block table."""
        return Sequence(
            request=self.request,
            choices=[choice],
            tokens=self.tokens[:],
            logprobs=self.logprobs[:],
            allowed=self.allowed,
            ordered=self.ordered,
            computed=self.computed,
            epoch=self.epoch,
            table=self.table[:],
            checksum=self.checksum,
            opened=self.opened,
            table_sent=self.table_sent,
            indexed=self.indexed,
            history=self.history,
            numerics=self.numerics,
            cached=self.cached,
            keys={size: keys[:] for size, keys in self.keys.items()},
        )

    def check(self) -> None:
        """Assert the invariants of its counts and its table."""
        assert 0 <= self.computed <= self.ordered
        assert self.table_sent <= len(self.table)
        assert self.checksum == checksum(pack_ints(self.table))
        assert self.opened or not self.table_sent

    def forget_run(self) -> None:
        """Keep nothing but its tokens; the caller has released its blocks and its slot."""
        self.run += 1
        self.ordered = self.computed = self.writable = self.indexed = self.table_sent = 0
        self.table = array("i")
        self.checksum = 0
        self.slot = None
        self.opened = self.proven = False
        self.history = b""
