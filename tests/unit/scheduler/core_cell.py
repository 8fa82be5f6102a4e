"""A scheduler core that is told events one by one."""

from dataclasses import dataclass, field

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    ChoiceState,
    Finish,
    Join,
    Message,
    Outputs,
    Plan,
    Result,
    Submit,
    ToScheduler,
    WorkerHello,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.core import Arrived, Event, Scheduler

EPOCH = 1 << 20


@dataclass
class Cell:
    """A scheduler, and what it has sent to whom."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(EPOCH, check=True))
    now: float = 100.0
    sent: list[tuple[bytes, Message]] = field(default_factory=list)

    def tell(self, peer: bytes, message: ToScheduler) -> list[Message]:
        return self.events(Arrived(peer, message))

    def events(self, *events: Event) -> list[Message]:
        sends = [(send.peer, send.message) for send in self.scheduler.handle(events, self.now)]
        self.sent += sends
        return [message for _, message in sends]

    def settle(self) -> None:
        """Let so much time pass that all workers that live have been heard."""
        for _ in range(4):
            self.now += 0.4
            self.events()

    def join(
        self, peer: bytes = b"w", blocks: int = 50, slots: int = 8, numerics: str = "class"
    ) -> int:
        hello = WorkerHello(
            PROTOCOL, "host", 1, 1, "model", numerics, 4, blocks, slots, 100, 64, 1000
        )
        join = next(m for m in self.tell(peer, hello) if isinstance(m, Join))
        return join.epoch

    def submit(
        self, request: str = "r", prompt: int = 6, choices: int = 1, **fields: object
    ) -> list[Message]:
        attempt = fields.pop("attempt", 0)
        states = fields.pop("states", [ChoiceState(index) for index in range(choices)])
        names = ("left", "window", "age", "continues")
        limits = {name: fields.pop(name) for name in names if name in fields}
        params = SamplingParams(**({"max_tokens": 3, "seed": 1} | fields))  # type: ignore[arg-type]
        ids = pack_ints(range(prompt))
        return self.tell(b"g", Submit(request, attempt, ids, params, states, **limits))  # type: ignore[arg-type]

    def plans(self, peer: bytes = b"w") -> list[Plan]:
        return [m for to, m in self.sent if to == peer and isinstance(m, Plan)]

    def answer(self, plan: Plan, *tokens: int, peer: bytes = b"w") -> list[Message]:
        return self.tell(peer, Result(plan.epoch, plan.step, pack_ints(tokens)))

    def outputs(self) -> list[tuple[int, int, list[int], Finish | None]]:
        """(choice, position, tokens, finish) of all outputs so far."""
        return [
            (item.choice, item.position, list(unpack_ints(item.tokens)), item.finish)
            for _, message in self.sent
            if isinstance(message, Outputs)
            for item in message.items
        ]
