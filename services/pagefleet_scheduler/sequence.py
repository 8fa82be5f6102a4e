"""What the scheduler knows of a request: its choices, and the sequences that produce them.

A sequence is one stream of tokens. It has no phase. Three counts say where it is, and a step makes
the later ones catch up with the earlier:

    length     tokens that it has, including those of steps whose results are not back
    ordered    positions whose keys and values some plan has ordered
    computed   positions whose result was accepted

Prefill, decode and recomputation are all "feed the positions from `ordered` to `length`". When a
sequence loses its blocks (preempted, its worker died), `ordered` and `computed` return to 0 and
its `run` counts one more, so that what is still under way for the old run is told apart.
"""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from pagefleet.params import SamplingParams
from pagefleet.wire import Finish, Ints, Logprobs, Numerics, checksum, pack_ints
from pagefleet_scheduler.beam import BeamSearch
from pagefleet_scheduler.blocks import BlockKey, History, root
from pagefleet_scheduler.prompt_lookup import PromptLookup

AGING = 30.0
"""Seconds of waiting that are worth one level of priority."""


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
    """Tells requests apart that are equal in all else."""
    arrived: float
    priority: int = 0
    """Lower goes first."""
    tenant: str = ""
    weight: float = 1.0
    """Of its tenant, whose share of the service it is in proportion to."""
    began: float | None = None
    """When it first ran; None: it never did."""
    prediction: "array[int]" = field(default_factory=lambda: array("i"))
    """What its outputs may repeat."""
    window: int = 0
    """Outputs that each choice may have beyond those it came with; 0: any number."""
    deadline: float | None = None
    sequences: "dict[int, Sequence]" = field(default_factory=dict)
    """Of each choice that goes on; several choices share one until their first token."""
    finished: "dict[int, Sequence]" = field(default_factory=dict)
    """Of the other choices, in case the gateway misses their end."""
    search: BeamSearch | None = None
    """A beam search: its sequences are beams, numbered as they come, and answer no choice."""
    answers: dict[int, int] = field(default_factory=dict)
    """The choices that a beam search is to answer, each with the rank of its answer."""
    prompt_logprobs_sent: int = 1
    """Position in the prompt up to which its logprobs were sent; the first token has none."""

    @property
    def has_run(self) -> bool:
        """Whether it ever ran, so that its client may have tokens of it."""
        return self.began is not None

    @property
    def queued(self) -> int:
        """Microseconds that it waited before it first ran, if it ran."""
        return 0 if self.began is None else round(1e6 * (self.began - self.arrived))

    @property
    def turn(self) -> float:
        """When it came, as far as its tenant's other requests are concerned; in seconds."""
        return self.arrived + AGING * self.priority

    @property
    def order(self) -> tuple[float, int]:
        """Who goes first among those that have run; all others come later."""
        began = math.inf if self.began is None else self.began
        return began + AGING * self.priority, self.number

    @property
    def ordered_params(self) -> SamplingParams:
        """What a worker is told: of a beam it gives the most likely tokens, and chooses none."""
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
        """A choice goes on no longer; one that was aborted is not remembered."""
        if (sequence := self.sequences.pop(choice, None)) is not None:
            self.finished[choice] = sequence


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens that runs, waits or has ended."""

    request: Request
    choices: list[int]
    """One, or those that begin together: the first sample gives each its token and forks them."""
    tokens: "array[int]"
    """The prompt and the outputs that are known."""
    logprobs: list[Logprobs] = field(default_factory=list)
    """Of the outputs since `base`, where they were asked for."""
    finish: Finish | None = None
    candidates: Logprobs | None = None
    """Of a beam: its likely next tokens, until all beams of the search have theirs."""

    # --- what its gateway has, and takes ---
    base: int = 0
    """Outputs that the gateway already had when it submitted."""
    sent: int = 0
    """Outputs sent to the gateway."""
    sent_before: int = 0
    """Outputs that had been sent when its last beat came: by the next it must have them."""
    allowed: int | None = None
    """Outputs that its gateway takes for now; None: any number. `allow` changes it."""
    limit: int = field(init=False)
    """Tokens, with those of the prompt, that it may have for now."""

    # --- how far it is ---
    ordered: int = 0
    computed: int = 0
    ahead: int = 0
    """Samples that are ordered and whose values are not back."""
    flying: int = 0
    """Rows whose results are not back; until they are, a sequence that waits is not let in."""
    run: int = 0
    """Counts how often it lost its blocks."""
    cached: int = 0
    """Prompt tokens that its first run found in the prefix cache."""

    # --- its place at a worker ---
    epoch: int = 0
    """Of the worker that runs it, or ran it last."""
    numerics: Numerics = 0
    """The class of the worker where it last ran, or of its tokens if somebody has any."""
    slot: int | None = None
    """At the worker that runs it."""
    opened: bool = False
    """Whether the worker was told of the slot."""
    table: "array[int]" = field(default_factory=lambda: array("i"))
    """Its block table."""
    checksum: int = 0
    """Of the table."""
    table_sent: int = 0
    """Entries of the table that the worker was told."""
    indexed: int = 0
    """Full blocks of this run that went through the prefix index."""
    history: History = b""
    """What its next block to be indexed continues."""

    # --- what is found again of its tokens ---
    keys: dict[int, list[BlockKey]] = field(default_factory=dict)
    """Of its full blocks, as far as somebody asked, by the size of blocks: workers may differ."""
    lookup: PromptLookup | None = None
    """Where its drafts come from, once some were asked for."""

    # --- the deaths of its workers ---
    lost: float | None = None
    """When its worker was lost; None once it has got a token since."""
    proven: bool = False
    """A step of this run has given it something."""
    suspicion: int = 0
    """1 or 2: it may have ended a worker and runs alone, the 1s first (`quarantine`); 0: not so."""
    crashes: float = 0.0
    """Of workers while it ran alone, since its last token."""
    excused: int = 0
    """Deaths of workers by chance before the first of these."""

    def __post_init__(self) -> None:
        """Know the limit."""
        self.allow(self.allowed)

    def __repr__(self) -> str:
        state = self.finish or ("runs" if self.slot is not None else "waits")
        return (
            f"<Sequence {self.request.id}/{self.choices} {state}, {self.computed} computed, "
            f"{self.ordered} ordered of {self.length}, {len(self.table)} blocks>"
        )

    @property
    def order(self) -> tuple[tuple[float, int], int]:
        """Who goes first among sequences."""
        return self.request.order, self.choices[0]

    @property
    def length(self) -> int:
        """Tokens it has, with those that are sampled but not back."""
        return len(self.tokens) + self.ahead

    @property
    def outputs(self) -> int:
        """Generated tokens that are known."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Positions that can be fed now.

        None where the last token that it may have is sampled already: nobody needs its keys yet.
        """
        length = len(self.tokens) + self.ahead
        return length - self.ordered if length < self.limit else 0

    @property
    def paused(self) -> bool:
        """Whether it has all the outputs that its gateway takes for now."""
        return len(self.tokens) >= self.limit

    def allow(self, outputs: int | None) -> None:
        """Let it have so many outputs for now; None: as many as were asked for.

        A prompt is fed even if no output was.
        """
        self.allowed = outputs
        most = max(self.request.params.max_tokens, 1)
        self.limit = len(self.request.prompt) + (most if outputs is None else min(most, outputs))

    @property
    def protected(self) -> bool:
        """Whether it came back from a preemption and has not got a token since."""
        return self.run > 0 and not self.proven

    def answers(self, choice: int) -> bool:
        """Whether a choice that began here is still wanted, and has no sequence of its own."""
        return self.request.sequences.get(choice) is self

    @property
    def waits_for_others(self) -> bool:
        """Whether its next token is known only once the scheduler has seen the result."""
        return len(self.choices) > 1 or self.request.search is not None

    def belongs_with(self, other: "Sequence") -> bool:
        """Whether both are beams of one search, which run and lose their blocks together."""
        return self.request is other.request and self.request.search is not None

    @property
    def may_draft(self) -> int:
        """Drafts behind its last token that could all be outputs, and another one after them."""
        return self.limit - len(self.tokens) - 1

    @property
    def idles(self) -> bool:
        """Whether it is a beam that waits for other beams."""
        return self.request.search is not None and not self.flying and self.pending <= 0

    def samples_at(self, end: int) -> bool:
        """Whether a row that ends before position `end` gives a new token."""
        return end == self.length and self.request.params.max_tokens > 0

    def full_keys(
        self,
        block_size: int,
        limit: int,
        digest: Callable[[bytes, Ints], bytes],
        tokens: "array[int]",
    ) -> list[BlockKey]:
        """Keys of the full blocks among the first `limit` of its tokens, the next ones included."""
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
        """Change one entry of the table."""
        self.table[index] = block
        self.checksum = checksum(pack_ints(self.table))

    def forked(self, choice: int) -> "Sequence":
        """The sequence of one of its choices, which has all of its blocks as well."""
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
        """Assert the invariants of what it has at a worker."""
        assert 0 <= self.computed <= self.ordered
        assert self.table_sent <= len(self.table)
        assert self.checksum == checksum(pack_ints(self.table))
        assert self.opened or not self.table_sent

    def forget_run(self) -> None:
        """Return to having nothing but its tokens; whoever calls released its blocks and slot."""
        self.run += 1
        self.ordered = self.computed = self.indexed = self.table_sent = 0
        self.table = array("i")
        self.checksum = 0
        self.slot = None
        self.opened = self.proven = False
        self.history = b""
