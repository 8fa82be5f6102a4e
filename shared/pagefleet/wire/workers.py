"""Between the scheduler and workers: plans one way, results and beats the other.

Rules of the plan. A worker runs plans strictly in the order of their step numbers. Inside one, the
order is: releases, opens, forks, table deltas, swaps out, copies, swaps in, then the forward pass.
A block that is freed while plan N is made is handed out again in N+1 at the earliest. An unanswered
plan is sent again under the same number; a worker answers a repeated step from what it remembers.
Everything said under an older epoch is void.
"""

from typing import Annotated

import msgspec

from pagefleet.params import SamplingParams
from pagefleet.wire.parts import (
    Count,
    Floats,
    Ints,
    Logprobs,
    Message,
    Micros,
    Part,
    Size,
    check_ints,
)

SAMPLED = -1
"""As an input token: the token that the worker itself sampled last for the row's slot."""

ROW_FIELDS = 6
"""Integers of a row in `Plan.rows`: slot, start, count, logits, table length, table checksum."""


# --- worker -> scheduler ------------------------------------------------------------------------


class WorkerHello(Message, frozen=True):
    """I am here, empty; answered by `Join`."""

    protocol: int
    host: str
    """Of the machine: a process on the same host can be watched directly."""
    pid: Count
    started: int
    """The process's start time in kernel ticks: a later process of the same pid has another."""
    fingerprint: str
    """Of the model."""
    numerics: str
    """Workers of equal class compute equal bits."""
    block_size: Size
    blocks: Size
    slots: Size
    max_model_len: Size
    max_batched_tokens: Size
    """Tokens that one step may hold."""
    vocab_size: Size
    host_blocks: Annotated[int, msgspec.Meta(ge=0, le=2**24)] = 0
    """Blocks of the pool in host memory."""
    swap_micros: Micros = 0.0
    """Microseconds that moving a block between the pools takes."""
    compute_micros: Micros = 0.0
    """Microseconds that computing a token of a long prompt takes."""
    exact: bool = False
    """Whether a token has the same bits in every batch, and however its sequence is cut into
    rows."""


class RowError(Part, frozen=True):
    """One row of a step went wrong; the others are good."""

    row: int
    text: str


class PromptLogprobs(Part, frozen=True):
    """Logprobs of the prompt's tokens that a row's logits predict."""

    row: int
    position: int
    logprobs: Logprobs


class Result(Message, frozen=True):
    """What a step gave.

    `tokens` lists the samples in the order of the plan: by row, within a row by position, within a
    position by choice. `logprobs` names those samples, by index, whose parameters ask for them.
    """

    epoch: int
    step: int
    tokens: Ints
    logprobs: list[tuple[int, Logprobs]] = []
    prompts: list[PromptLogprobs] = []
    errors: list[RowError] = []
    micros: int = 0
    """Microseconds the step took."""
    embeddings: list[tuple[int, Floats]] = []
    """By rows: the embeddings of prompts that end there, if `SamplingParams.embedding` asks."""

    def __post_init__(self) -> None:
        """Refuse what cannot be unpacked."""
        check_ints(self.tokens, *(embedding for _, embedding in self.embeddings))


class WorkerBeat(Message, frozen=True):
    """Every 200 ms: I live, and this is how far the computation is."""

    epoch: int
    progress: int
    """A counter that the computing thread advances at every layer."""
    busy: bool
    """Whether a step is being computed."""


class WorkerBye(Message, frozen=True):
    """I leave; what ran here has to run elsewhere."""

    epoch: int
    failed: bool = False
    """Whether that is because a step failed: then the sequences in it are suspects."""


# --- scheduler -> worker ------------------------------------------------------------------------


class Join(Message, frozen=True):
    """You belong to the cell; start with nothing, under this epoch."""

    epoch: int


class Fence(Message, frozen=True):
    """Your epoch is void: drop everything, and say Hello again."""

    text: str


class Open(Part, frozen=True):
    """Begins a slot: with everything about its sequence that is not in the pool."""

    slot: int
    params: SamplingParams
    prompt: Ints
    output: Ints
    choices: list[int]
    """Choices to sample for; several share the slot until their first token."""
    salt: bytes = b""


class Plan(Message, frozen=True):
    """Order one step.

    `rows` has `ROW_FIELDS` integers a row: slot; start, the position of its first input token;
    count, how many input tokens it has; logits, at how many of its last positions to sample;
    and the length and the checksum of its block table. `tokens` holds the input ids of all rows,
    `SAMPLED` for those that the scheduler has not seen yet.
    """

    epoch: int
    step: int
    rows: Ints
    tokens: Ints
    release: Ints = b""
    """Slots that end."""
    opens: list[Open] = []
    forks: Ints = b""
    """Triples (target slot, source slot, choice): the target begins as a copy of the source, with
    its table and history, and samples for that one choice. They may be the same slot."""
    tables: Ints = b""
    """Triples (slot, index, block): entries of block tables that are new or changed."""
    copies: Ints = b""
    """Pairs (source block, target block). No target is the source or target of another pair."""
    full_tables: Ints = b""
    """With `--check`: the block tables of all rows, whole, one after another."""
    swap_out: Ints = b""
    """Pairs (device block, host block), moved before any copy."""
    swap_in: Ints = b""
    """Pairs (host block, device block), moved after all copies."""

    def __post_init__(self) -> None:
        """Refuse what cannot be unpacked."""
        orders = (self.release, self.forks, self.tables, self.copies, self.swap_out, self.swap_in)
        check_ints(self.rows, self.tokens, self.full_tables, *orders)
