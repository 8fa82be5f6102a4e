"""The messages between gateways, the scheduler and workers. This file is the contract.

    gateway --Submit, Abort, Beat--> scheduler --Plan--> worker
    gateway <--Outputs, Rejected---- scheduler <-Result- worker

A message is one ZeroMQ frame: msgpack, and behind it the CRC-32 of that in four bytes,
little-endian, which finds all damage within 32 bits and all but one in 2**32 of any other. The
msgpack is a typed array whose first element names the message.
Token ids, block tables and slots travel as `Ints`: little-endian int32 in one binary string, whose
cost is that of a memory copy. Fields are only ever appended, with a default; anything else raises
`PROTOCOL`, and parties of different protocols refuse each other in the handshake.

Every message is idempotent and its sender has a timer: nothing is believed to have arrived until
something that follows from it came back. Times are durations, never clock readings.

Rules of the plan. A worker runs plans strictly in the order of their step numbers. Inside one:
releases, opens, forks, table deltas, swaps out, copies, swaps in, then the forward pass. A block
that is freed while plan N is made is handed out again in N+1 at the earliest. An unanswered plan
is sent again under the same number; a worker answers a repeated step from what it remembers.
Everything said under an older epoch is void.
"""

import sys
import zlib
from array import array
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from pagefleet.params import SamplingParams

PROTOCOL = 2

_Number = TypeVar("_Number", int, float)
_Decoded = TypeVar("_Decoded")

Ints: TypeAlias = bytes
"""Little-endian int32, one after another."""

Floats: TypeAlias = bytes
"""Little-endian float32, one after another."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Of anything, or a place in it: what `Ints` can hold."""

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
"""Of something that is kept track of one by one."""

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Micros: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

MOST_USE = 2**53
"""Of anything that a tenant uses: sums of it are integers in every language."""

Use: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST_USE)]

SAMPLED = -1
"""As an input token of a row: the token that the worker itself sampled last for this slot."""

_CHECKSUM_BYTES = 4

ROW_FIELDS = 6
"""Integers a row of `Plan.rows` has: slot, start, count, logits, table length, table checksum."""


def pack_ints(values: Iterable[int]) -> Ints:
    """Encode integers of 32 bits.

    Raises:
        OverflowError: one does not fit.
    """
    return _little_endian(array("i", values)).tobytes()


def unpack_ints(packed: Ints) -> "array[int]":
    """Decode what `pack_ints` encoded.

    Raises:
        ValueError: the length is not a multiple of four bytes.
    """
    values = array("i")
    values.frombytes(packed)
    return _little_endian(values)


def pack_floats(values: Iterable[float]) -> Floats:
    """Encode numbers as float32."""
    return _little_endian(array("f", values)).tobytes()


def unpack_floats(packed: Floats) -> "array[float]":
    """Decode what `pack_floats` encoded."""
    values = array("f")
    values.frombytes(packed)
    return _little_endian(values)


def _little_endian(values: "array[_Number]") -> "array[_Number]":
    if sys.byteorder == "big":
        values.byteswap()
    return values


def checksum(table: Ints, before: int = 0) -> int:
    """CRC-32 of a block table as a signed 32-bit integer; `before` is that of what precedes it."""
    crc = zlib.crc32(table, before & 0xFFFFFFFF)
    return crc - (1 << 32) if crc >= 1 << 31 else crc


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of all messages: an array, tagged with the name of its class."""


def _check_ints(*fields: Ints) -> None:
    """Refuse what is no list of 32-bit integers where it is decoded, not where it is used.

    Raises:
        ValueError: a length is not a multiple of four bytes.
    """
    for field in fields:
        if len(field) % 4:
            raise ValueError(f"{len(field)} bytes are no integers of 32 bits")


class Part(msgspec.Struct, array_like=True, frozen=True):
    """Base of what messages are made of."""


# --- what several messages carry ----------------------------------------------------------------


class Finish(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    """An end-of-sequence or stop token; it is the last of the choice's tokens."""
    LENGTH = "length"
    TIMEOUT = "timeout"
    """The request's deadline passed."""
    ABORT = "abort"
    ERROR = "error"


class Logprobs(Part, frozen=True):
    """Logprobs of m consecutive tokens, each with the same number k of alternatives.

    They are the model's own: before temperature, penalties and masks.
    """

    chosen: Floats
    """[m]"""
    top_ids: Ints
    """[m, k], most likely first."""
    top: Floats
    """[m, k]"""

    def __post_init__(self) -> None:
        """Refuse lists that do not fit each other."""
        _check_ints(self.chosen, self.top_ids)
        tokens, alternatives = len(self.chosen), len(self.top_ids)
        if alternatives != len(self.top) or (alternatives % tokens if tokens else alternatives):
            raise ValueError("alternatives are not as many for each token")


class ChoiceState(Part, frozen=True):
    """What a gateway has received of one choice: with the prompt, all that is needed to go on."""

    index: Count
    """The choice's number over the whole HTTP request; part of the sampler's counter."""
    tokens: Ints = b""
    finished: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be unpacked."""
        _check_ints(self.tokens)


# --- gateway -> scheduler -----------------------------------------------------------------------


class GatewayHello(Message, frozen=True):
    """I am here; answered by `Welcome`."""

    protocol: int


class Submit(Message, frozen=True):
    """Run this request, or go on with it: whatever is already received is not sent again."""

    request: str
    """Unique over all gateways and time."""
    attempt: int
    """Counts the times that the request was handed over; an older attempt is void."""
    prompt: Ints
    params: SamplingParams
    choices: list[ChoiceState]
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """Lower goes first, within a tenant."""
    salt: bytes = b""
    """The tenant's part of every prefix hash: content is shared only under an equal salt."""
    age: Seconds = 0.0
    """Seconds since the client's request came in."""
    left: Seconds | None = None
    """Seconds until its deadline, the queue included; None: it may take any time."""
    window: Count = 0
    """Tokens that may be sent of each choice, beyond those received, until `Credit` allows more;
    0: any number."""
    tenant: str = ""
    """Who asks: tenants share what the cell can do in proportion to their weights."""
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000.0)] = 1.0
    continues: str = ""
    """The request of before whose stream this goes on with, for a client that lost it. It ends, and
    whatever the scheduler has of it is sent here, from the first token."""

    def __post_init__(self) -> None:
        """Refuse what cannot be unpacked, and choices of the same number."""
        _check_ints(self.prompt)
        if len({choice.index for choice in self.choices}) < len(self.choices):
            raise ValueError("two choices have the same number")


class Abort(Message, frozen=True):
    """Stop these choices, or all where none is named."""

    request: str
    attempt: int
    choices: list[int] = []


class Credit(Message, frozen=True):
    """So many tokens of these choices may be sent, counted from the first.

    A choice that has used its credit pauses, and gives up what it holds when anyone waits.
    """

    request: str
    attempt: int
    limits: dict[int, int]


class OpenRequest(Part, frozen=True):
    """One line of a beat: how many tokens of each unfinished choice have come in."""

    request: str
    attempt: int
    positions: dict[int, int]


class TenantUse(Part, frozen=True):
    """What a tenant that has limits uses."""

    requests: Use
    """That it sent."""
    tokens: Use
    """Of its prompts and answers."""
    open: Use
    """Requests that are being answered now."""


class GatewayBeat(Message, frozen=True):
    """Every 200 ms: I live, and this is how far I got. Answered by `Pulse`."""

    open: list[OpenRequest]
    used: dict[str, TenantUse] = {}
    """By tenants, at this gateway, since it began."""


class GatewayBye(Message, frozen=True):
    """I leave; my requests may be forgotten."""


class Inspect(Message, frozen=True):
    """How is memory used, and who waits for it? Answered by `Snapshot`."""

    query: int
    """A number of the asker's, which the answer repeats."""
    blocks: bool = False
    """Tell of every single block, too."""


# --- scheduler -> gateway -----------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The scheduler takes requests; a new `epoch` means that it knows nothing of the old ones."""

    epoch: int
    protocol: int


class EngineStats(Part, frozen=True):
    """One worker's figures; counters count from the scheduler's start."""

    engine: int
    """A number that tells the workers of this scheduler apart."""
    running: int
    blocks: int
    """Of the pool."""
    used_blocks: int
    """Held by running sequences."""
    cached_blocks: int
    """Held by nobody, kept for their content."""
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Of these, tokens found."""
    preemptions: int
    swapped_out: int = 0
    """Blocks moved to the host pool."""
    swapped_in: int = 0
    drafted: int = 0
    """Tokens fed on trial."""
    drafts_kept: int = 0
    block_size: int = 0
    """Tokens a block holds."""


STEP_BOUNDS = tuple(2**power for power in (0, *range(3, 15)))
"""Tokens of a step, as `CellStats.steps` tells them apart."""


class CellStats(Part, frozen=True):
    """Figures of no single worker, since the scheduler began."""

    steps: list[int]
    """Steps ordered, by tokens: at most each of `STEP_BOUNDS`, but more than the one before; and
    those with more."""
    step_tokens: int
    """Of all steps."""
    dropped_results: int
    """Results that came from a worker that was lost, or a second time."""
    lost_workers: int
    migrations: int
    """Sequences that went on elsewhere because their worker was lost."""
    quarantined: int
    """Requests that were refused because they ended workers."""
    recoveries: int
    """Sequences that got a token again after their worker was lost."""
    recovery_micros: int
    """Microseconds from that loss to that token, of all of these."""
    class_changes: int = 0
    """Sequences with tokens that went on in another class of numerics."""
    suspects: int = 0
    """Sequences that ran alone, because a worker ended while it computed them."""
    moved: int = 0
    """Open streams whose clients came back through another connection."""
    recalled: int = 0
    """Streams that went on from tokens that were kept after their gateway or client had gone."""
    joins: int = 0
    """Epochs that workers were given."""


class Pulse(Message, frozen=True):
    """How the cell is; answers every beat."""

    epoch: int
    workers: int
    """Workers that make progress."""
    running: int
    waiting: int
    max_model_len: int
    """The longest sequence that some worker's pool holds; 0 while there is no worker."""
    unknown: list[str]
    """Requests of the beat that the scheduler does not have: submit them again."""
    stalled: bool
    """Requests wait and nothing has run for seconds."""
    engines: list[EngineStats] = []
    elsewhere: dict[str, TenantUse] = {}
    """What tenants used at all other gateways, since this scheduler began."""
    cell: CellStats | None = None


class Output(Part, frozen=True):
    """New tokens of one choice."""

    request: str
    attempt: int
    choice: int
    position: int
    """Of the first token, counted from the first generated one."""
    tokens: Ints
    logprobs: Logprobs | None = None
    finish: Finish | None = None
    cached: int = 0
    """Prompt tokens that came out of the prefix cache, of this choice's first run."""
    score: float | None = None
    """Of an answer of a beam search."""
    queued: int = 0
    """Microseconds that the request waited before it first ran; with a choice's first tokens."""


class PromptOutput(Part, frozen=True):
    """Logprobs of a piece of the prompt."""

    request: str
    attempt: int
    position: int
    """Of the first token they speak of; the first token of a prompt has none."""
    logprobs: Logprobs


class Outputs(Message, frozen=True):
    """News of any number of requests."""

    epoch: int
    items: list[Output]
    prompts: list[PromptOutput] = []


class Reason(StrEnum):
    """Why a request was refused."""

    INVALID = "invalid"
    TOO_LONG = "too_long"
    OVERLOADED = "overloaded"
    NO_WORKER = "no_worker"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    """Workers end when they compute it."""
    MOVED = "moved"
    """Said by a gateway itself, of what `Moved` ends."""


class Rejected(Message, frozen=True):
    """The request ends here; nothing more will come."""

    request: str
    attempt: int
    reason: Reason
    text: str
    param: str | None = None
    """The field of the client's request that is at fault."""


class Moved(Message, frozen=True):
    """The request's client has gone to another gateway, where its stream goes on; it ends here."""

    request: str


class WorkerMemory(Part, frozen=True):
    """One worker's pool at this moment; counters count from its joining."""

    engine: int
    """See `EngineStats`."""
    running: int
    """Sequences that have a slot."""
    slots: int
    block_size: int
    blocks: int
    free: int
    """Blocks whose content is of no use."""
    cached: int
    """Blocks that nobody holds, kept for their content."""
    holders: dict[int, int]
    """The other blocks: how many are in the tables of one sequence, of two, ..."""
    empty_slots: int
    """Token slots of these that hold no token: the waste of paging."""
    host_blocks: int
    """Of the pool in host memory."""
    host_cached: int
    copies: int
    """Blocks copied because one of their holders wrote."""
    preemptions: int
    swapped_out: int
    """Blocks moved to the host pool."""
    swapped_in: int
    map: bytes = b""
    """If asked for, a byte a block: its holders (254: so many or more), or `CACHED_BLOCK`."""


CACHED_BLOCK = 255
"""In `WorkerMemory.map`: held by nobody, kept for its content."""


class Wait(StrEnum):
    """What a sequence that has no blocks waits for."""

    WORKER = "worker"
    """No worker has joined."""
    LARGER_WORKER = "larger_worker"
    """No worker's pool could ever hold it."""
    CLIENT = "client"
    """Its client has not taken the tokens that it has."""
    RESULT = "result"
    """A step that it took part in before it lost its blocks is not back."""
    TURN = "turn"
    """Others go first, who wait as well."""
    SLOT = "slot"
    """No worker has a slot to spare."""
    BLOCKS = "blocks"
    """No worker has so many blocks to spare."""


class WaitingSequence(Part, frozen=True):
    """Why a sequence is not running."""

    request: str
    choices: list[int]
    seconds: float
    """Since its request came."""
    tokens: int
    """Prompt and outputs that it has: so many positions are to be computed, less what is cached."""
    losses: int
    """How often it lost its blocks."""
    reason: Wait
    wanted: int = 0
    """Blocks that it needs, with those that admission keeps back."""
    available: int = 0
    """Blocks that there are, at the worker that lacks least."""


class Snapshot(Message, frozen=True):
    """Memory, explained: every worker's pool, and every sequence that waits, oldest first."""

    epoch: int
    query: int
    workers: list[WorkerMemory]
    waiting: list[WaitingSequence]


class Refused(Message, frozen=True):
    """The handshake failed: you and I cannot work together."""

    text: str


# --- worker -> scheduler ------------------------------------------------------------------------


class WorkerHello(Message, frozen=True):
    """I am here, empty; answered by `Join`."""

    protocol: int
    host: str
    """Of the machine: a process on the same host can be watched directly."""
    pid: Count
    started: int
    """The process's start time in kernel ticks, which tells it from a later one of the same pid."""
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


class RowError(Part, frozen=True):
    """One row of a step went wrong; the others are good."""

    row: int
    text: str


class PromptLogprobs(Part, frozen=True):
    """Logprobs of the prompt's tokens that a row's logits speak of."""

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

    def __post_init__(self) -> None:
        """Refuse what cannot be unpacked."""
        _check_ints(self.tokens)


class WorkerBeat(Message, frozen=True):
    """Every 200 ms: the counter that the compute thread advances at every layer."""

    epoch: int
    progress: int
    busy: bool
    """A step is being computed."""


class WorkerBye(Message, frozen=True):
    """I leave; what I was running is to run elsewhere."""

    epoch: int
    failed: bool = False
    """Because a step failed: what was in it is suspect."""


# --- scheduler -> worker ------------------------------------------------------------------------


class Join(Message, frozen=True):
    """You belong to the cell; start from nothing, under this epoch."""

    epoch: int


class Fence(Message, frozen=True):
    """You are void: drop everything and say Hello again."""

    text: str


class Open(Part, frozen=True):
    """A slot begins: everything about the sequence that is not in the pool."""

    slot: int
    params: SamplingParams
    prompt: Ints
    output: Ints
    choices: list[int]
    """Choices to sample for; several share the slot until their first token is there."""
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
    """Triples (target slot, source slot, choice): the target begins as a copy of the source, table
    and history, and samples for that one choice. Source and target may be the same slot."""
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
        _check_ints(self.rows, self.tokens, self.full_tables, *orders)


ToScheduler: TypeAlias = (
    GatewayHello | Submit | Abort | Credit | GatewayBeat | GatewayBye | Inspect
    | WorkerHello | Result | WorkerBeat | WorkerBye
)  # fmt: skip
ToGateway: TypeAlias = Welcome | Pulse | Outputs | Rejected | Moved | Refused | Snapshot
ToWorker: TypeAlias = Join | Fence | Plan | Refused

FromGateway: TypeAlias = GatewayHello | Submit | Abort | Credit | GatewayBeat | GatewayBye | Inspect
FromWorker: TypeAlias = WorkerHello | Result | WorkerBeat | WorkerBye

_encoder = msgspec.msgpack.Encoder()
_from_gateway: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


class WireError(Exception):
    """Bytes that are no message of the expected direction."""


def encode(message: Message) -> bytes:
    """One frame."""
    return sealed(_encoder.encode(message))


def sealed(content: bytes) -> bytes:
    """Content with its checksum behind it."""
    return content + zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little")


def unsealed(frame: bytes) -> memoryview:
    """The content of a frame, without its checksum.

    Raises:
        WireError: it was damaged on its way.
    """
    content = memoryview(frame)[:-_CHECKSUM_BYTES]
    if frame[-_CHECKSUM_BYTES:] != zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little"):
        raise WireError("not a message: its checksum is another")
    return content


def decode_from_gateway(frame: bytes) -> FromGateway:
    """Decode what a scheduler gets from a gateway.

    Raises:
        WireError: it is something else, or a field is malformed.
    """
    return _decode(_from_gateway, frame)


def decode_from_worker(frame: bytes) -> FromWorker:
    """Decode what a scheduler gets from a worker.

    Raises:
        WireError: it is something else, or a field is malformed.
    """
    return _decode(_from_worker, frame)


def decode_to_gateway(frame: bytes) -> ToGateway:
    """Decode what a gateway gets from the scheduler.

    Raises:
        WireError: it is something else, or a field is malformed.
    """
    return _decode(_to_gateway, frame)


def decode_to_worker(frame: bytes) -> ToWorker:
    """Decode what a worker gets from the scheduler.

    Raises:
        WireError: it is something else, or a field is malformed.
    """
    return _decode(_to_worker, frame)


def _decode(decoder: "msgspec.msgpack.Decoder[_Decoded]", frame: bytes) -> _Decoded:
    try:
        return decoder.decode(unsealed(frame))
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from error
