"""What a worker process runs: an engine. The real one, EchoEngine and SimEngine are alike here."""

from dataclasses import asdict, dataclass
from typing import Protocol

from pagefleet.wire import PROTOCOL, Plan, Result, WorkerHello


@dataclass(frozen=True)
class EngineFacts:
    """What a worker says of itself in its Hello; the fields are those of `wire.WorkerHello`."""

    fingerprint: str
    numerics: str
    block_size: int
    blocks: int
    slots: int
    max_model_len: int
    max_batched_tokens: int
    vocab_size: int
    host_blocks: int = 0
    swap_micros: float = 0.0
    compute_micros: float = 0.0
    exact: bool = False

    def hello(self, host: str, pid: int, started: int) -> WorkerHello:
        """What a worker process with this engine says first."""
        return WorkerHello(PROTOCOL, host, pid, started, **asdict(self))


class PlanError(Exception):
    """A plan that contradicts what the engine knows: scheduler and worker have lost each other.

    The worker's answer is to start again from nothing under a new epoch.
    """


class DeviceLostError(Exception):
    """The device computes nothing more in this process: whoever started it starts another."""


class Launched(Protocol):
    """A step that is under way on the device."""

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> Result:
        """Wait until the step is done, and say what it gave.

        Raises:
            DeviceLostError: there is no use in going on.
        """
        ...


class Engine(Protocol):
    """Runs plans in the order of their steps; but for `lives`, called from one thread only."""

    @property
    def facts(self) -> EngineFacts:
        """Never change while the engine lives."""
        ...

    def lives(self) -> bool:
        """Whether every process that it needs gives signs of life; may be asked at any time."""
        ...

    def reset(self) -> None:
        """Begin an epoch: forget every slot and block."""
        ...

    def launch(self, plan: Plan) -> Launched:
        """Order a step. A step may be launched before the result of the one before it is taken.

        Raises:
            PlanError: the plan contradicts the epoch's history.
            DeviceLostError: there is no use in going on.
        """
        ...
