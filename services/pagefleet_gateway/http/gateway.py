"""What all requests of a gateway share."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from pagefleet.settings import GatewaySettings
from pagefleet_gateway.cell.client import SchedulerClient
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.telemetry.metrics import Metrics
from pagefleet_gateway.telemetry.metrics_exchange import MetricsExchange
from pagefleet_gateway.tenants import Keyring

if TYPE_CHECKING:
    from pagefleet_gateway.telemetry.tracing import Tracer

KEEP_ALIVE_SECONDS: Final = 10.0
"""Without news, after which a stream says that it still waits."""

DRAINING: Final = "This server is shutting down."

_THREADS: Final = 8
"""Some of them wait for helper processes; many that compute would keep the GIL from the loop."""

_LARGE_BODY: Final = 1 << 18
_LARGE_THREADS: Final = 2
"""For bodies of so many bytes or more, which take up to seconds: no other waits behind them."""


class Context(NamedTuple):
    """Tokens that a request may have, and what makes them less than the model's own, in words."""

    tokens: int
    bound: str


@dataclass
class Gateway:
    """One gateway process."""

    settings: GatewaySettings
    model: ServedModel
    client: SchedulerClient
    metrics: Metrics
    keyring: Keyring = field(default_factory=Keyring)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS))
    large_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_LARGE_THREADS)
    )
    keep_alive: float = KEEP_ALIVE_SECONDS
    resume_secret: bytes = field(default_factory=lambda: os.urandom(32))
    """Signs the ids by which streams are resumed, here or at a gateway with the same."""
    tracer: "Tracer | None" = None
    exchange: MetricsExchange | None = None
    """With the other gateways of its port."""
    draining: bool = False
    """It finishes what it has, and takes nothing more."""

    def threads_for(self, content: bytes) -> ThreadPoolExecutor:
        """Where a body is understood."""
        return self.threads if len(content) < _LARGE_BODY else self.large_threads

    @property
    def max_model_len(self) -> int:
        """Tokens that a request which comes now may have."""
        return self.context.tokens

    @property
    def context(self) -> Context:
        """The same, and what bounds it."""
        own = self.model.manifest.max_model_len
        bounds = (
            (own, ""),
            (self.settings.max_model_len, f"--max-model-len; the model's own is {own}"),
            (self.client.link.longest, f"what a worker can hold; the model's own is {own}"),
        )
        known = [Context(tokens, bound) for tokens, bound in bounds if tokens is not None]
        return min(known, key=attrgetter("tokens"))
