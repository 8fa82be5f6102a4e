"""What is known of one HTTP request, from its first byte to its line in the log.

The outermost layer (`edge`) makes it and puts it into the ASGI scope; whoever learns something of
the request writes it down here.
"""

from dataclasses import dataclass, field
from uuid import uuid4

from starlette.types import Scope

from pagefleet_gateway.tenants import EVERYBODY, Tenant

_KEY = "pagefleet"
_LONGEST_ID = 128


@dataclass(slots=True)
class Record:
    """One request; times are of the monotonic clock, in seconds."""

    id: str
    began: float
    tenant: Tenant = EVERYBODY
    status: int = 0
    """0 until an answer begins."""
    error: str | None = None
    """The code of the error that it was answered with, or that ended its stream."""
    adapter: str = ""
    """The name of the LoRA adapter that was asked for, once that is known."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    handed_over: float | None = None
    """When the scheduler was given it."""
    queued: float | None = None
    """Seconds after that before it first ran; known with the first token, or where the end comes
    without one."""
    first_token: float | None = None
    last_token: float = 0.0
    prompts: list[str] = field(default_factory=list)
    """Texts, and those of the choices by number; only where they are to be logged."""
    answers: dict[int, str] = field(default_factory=dict)

    def phases(self, ended: float) -> list[tuple[str, float, float]]:
        """What it waited for, from when until when: the queue, if nothing is known of its end."""
        if self.handed_over is None:
            return [("gateway", self.began, ended)]
        phases = [("gateway", self.began, self.handed_over)]
        if self.queued is None:
            return [*phases, ("queue", self.handed_over, ended)]
        computed = ended if self.first_token is None else self.first_token
        ran = min(self.handed_over + self.queued, computed)
        phases += [("queue", self.handed_over, ran), ("prefill", ran, computed)]
        if self.first_token is None:
            return phases
        return [*phases, ("decode", self.first_token, self.last_token)]

    def write_down(self, texts: dict[int, str]) -> None:
        """How the choices go on."""
        for index, text in texts.items():
            self.answers[index] = self.answers.get(index, "") + text


def begin(scope: Scope, now: float) -> Record:
    """The record of a request that came in; a client's own name for it counts if it is fit."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    fit = 0 < len(given) <= _LONGEST_ID and given.isascii() and given.decode().isprintable()
    record = scope[_KEY] = Record(given.decode() if fit else uuid4().hex, now)
    return record


def record_of(scope: Scope) -> Record:
    """The record of a request that is under way."""
    record: Record = scope[_KEY]
    return record
