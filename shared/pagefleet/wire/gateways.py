"""Between gateways and the scheduler: requests and beats one way, tokens the other."""

from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec

from pagefleet.params import SamplingParams
from pagefleet.wire.parts import (
    ChoiceState,
    Count,
    Finish,
    Floats,
    Ints,
    Logprobs,
    Message,
    Numerics,
    Part,
    Seconds,
    check_ints,
)

MOST_USE = 2**53
"""The most of anything that a tenant can have used: an integer in every language."""

Use: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST_USE)]


# --- gateway -> scheduler -----------------------------------------------------------------------


class GatewayHello(Message, frozen=True):
    """I am here; answered by `Welcome`."""

    protocol: int
    fingerprint: str = ""
    """Of the model whose tokens it reads and writes; empty if it does not say."""


class Submit(Message, frozen=True):
    """Run this request, or go on with it: tokens that the gateway has are not sent again."""

    request: str
    """Unique over all gateways and time."""
    attempt: int
    """Counts how often the request was submitted; what concerns an older attempt is void."""
    prompt: Ints
    params: SamplingParams
    choices: list[ChoiceState]
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] = 0
    """Lower goes first, within a tenant."""
    salt: bytes = b""
    """The tenant's part of every prefix hash: content is shared only under equal salts."""
    age: Seconds = 0.0
    """Seconds since the client's request came in."""
    left: Seconds | None = None
    """Seconds until its deadline, time in the queue included; None: there is none."""
    window: Count = 0
    """Tokens of each choice, beyond those received, that may be sent until `Credit` allows more;
    0: any number."""
    tenant: str = ""
    """Who asks: tenants share the cell in proportion to their weights."""
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000.0)] = 1.0
    continues: str = ""
    """An earlier request whose client lost its stream, and continues it here. That request ends,
    and whatever the scheduler has of it is sent here, from the first token."""
    prediction: Ints = b""
    """Tokens that the outputs may repeat: drafts are taken from them."""

    def __post_init__(self) -> None:
        """Refuse what cannot be unpacked, and choices of the same number."""
        check_ints(self.prompt, self.prediction)
        if len({choice.index for choice in self.choices}) < len(self.choices):
            raise ValueError("two choices have the same number")


class Abort(Message, frozen=True):
    """Stop these choices, or all if none is named."""

    request: str
    attempt: int
    choices: list[int] = []


class Credit(Message, frozen=True):
    """So many tokens of these choices may be sent, counted from the first one.

    A choice that has used up its credit pauses, and gives up slot and blocks if anyone needs them.
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
    """Requests that it sent."""
    tokens: Use
    """Tokens of its prompts and answers."""
    open: Use
    """Requests that are being answered now."""


class GatewayBeat(Message, frozen=True):
    """Every 200 ms: I live, and this is how far I got. Answered by `Pulse`."""

    open: list[OpenRequest]
    used: dict[str, TenantUse] = {}
    """By tenant: what was used at this gateway since it began."""
    fingerprint: str = ""
    """As in its Hello, which may have come before any worker's."""


class GatewayBye(Message, frozen=True):
    """I leave; my requests may be forgotten."""


# --- scheduler -> gateway -----------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The scheduler takes requests; a new `epoch` means that it knows nothing of the old ones."""

    epoch: int
    protocol: int
    max_model_len: int = 0
    """As `Pulse` says it."""


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
"""Upper bounds of the buckets of `CellStats.steps`, in tokens of a step."""


class CellStats(Part, frozen=True):
    """Figures of the whole cell since the scheduler began."""

    steps: list[int]
    """Steps ordered, in the buckets that `STEP_BOUNDS` bound, and one for larger steps."""
    step_tokens: int
    """Of all steps."""
    dropped_results: int
    """Results that came from a worker that was lost, or came twice."""
    lost_workers: int
    migrations: int
    """Sequences that went on elsewhere because their worker was lost."""
    quarantined: int
    """Requests that were refused because they ended workers."""
    recoveries: int
    """Sequences that got a token again after their worker was lost."""
    recovery_micros: int
    """Microseconds from the loss to that token, the sum over all of these."""
    class_changes: int = 0
    """Sequences with tokens that went on in another class of numerics."""
    suspects: int = 0
    """Sequences that ran alone, because a worker ended while it computed them."""
    moved: int = 0
    """Open streams whose clients came back through another connection."""
    recalled: int = 0
    """Streams that went on from tokens that were kept after their gateway or client had gone."""
    joins: int = 0
    """Epochs given to workers."""


class Pulse(Message, frozen=True):
    """The state of the cell; answers every beat."""

    epoch: int
    workers: int
    """Workers that make progress."""
    running: int
    waiting: int
    max_model_len: int
    """The longest sequence that the pool of a worker holds, which may be one that was lost and may
    come back; 0 while none is known, or some may not have been heard yet."""
    unknown: list[str]
    """Requests of the beat that the scheduler does not have: submit them again."""
    stalled: bool
    """Requests wait, and nothing has been computed for seconds."""
    engines: list[EngineStats] = []
    elsewhere: dict[str, TenantUse] = {}
    """What tenants have used at all other gateways since this scheduler began."""
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
    """Prompt tokens that the choice's first run took from the prefix cache."""
    score: float | None = None
    """Of an answer of a beam search."""
    queued: int = 0
    """Microseconds that the request waited before it first ran; said with the first tokens."""
    numerics: Numerics = 0
    """The class that computed the latest of them."""
    embedding: Floats | None = None
    """Of the prompt, if it was asked for; said with the choice's end."""


class PromptOutput(Part, frozen=True):
    """Logprobs of a piece of the prompt."""

    request: str
    attempt: int
    position: int
    """Of the first token whose logprobs these are; the first token of a prompt has none."""
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
    """Said by a gateway itself, of a request that `Moved` ends."""


class Rejected(Message, frozen=True):
    """The request ends here; nothing more will come."""

    request: str
    attempt: int
    reason: Reason
    text: str
    param: str | None = None
    """The field of the client's request that is at fault."""


class Moved(Message, frozen=True):
    """The request's client has gone to another gateway, where the stream goes on; it ends here."""

    request: str
