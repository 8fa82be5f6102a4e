"""The processes of a simulated cell: the code of production, with a virtual clock and network.

Each class is what `server.py` or `client.py` of its service is around the same sans-IO core.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import Any

import msgspec

from pagefleet.wire import ROW_FIELDS, Message, Output, Plan, Result, RowError, unpack_ints
from pagefleet_gateway.cell.link import BEAT_SECONDS, Reaction, SchedulerLink
from pagefleet_scheduler.core import Arrived, Event, Lost, Scheduler, Unreachable
from pagefleet_worker.interface import EngineFacts
from pagefleet_worker.membership import Membership
from pagefleet_worker.membership import Reaction as WorkerReaction
from pagefleet_worker.simulated.echo import EchoEngine
from tests.echo_cell import DECODER
from tests.simulation.clients import Client
from tests.simulation.network import SCHEDULER, Network
from tests.simulation.world import Process

TICK_SECONDS = 0.05

UPTIME = 1000.0
"""What a scheduler's clock says when the virtual one begins: it does not start with its process."""


class SchedulerProcess(Process):
    """`pagefleet_scheduler.server` around the real core, which checks its invariants."""

    def __init__(self, network: Network, incarnation: int, **options: Any) -> None:
        super().__init__(network.world, SCHEDULER, incarnation)
        self.core = Scheduler(self.world.random.getrandbits(55) << 7, check=True, **options)
        self._network = network
        self._events: list[Event] = []
        self._woken = False
        self._last = 0.0
        network.add(self)
        self.after(0.0, self._tick)

    def receive(self, sender: bytes, message: Message) -> None:
        self._events.append(Arrived(sender, message))  # type: ignore[arg-type]
        self._wake()

    def leave(self) -> None:
        """SIGTERM: it ends between two turns, and says nothing."""
        self.die()
        self.mute_after = inf

    def lose(self, peer: bytes) -> None:
        """The kernel says that a peer's process has ended."""
        self._events.append(Lost(peer))
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.after(0.0, self._turn)

    def _tick(self) -> None:
        waited = self.world.now - self._last
        if waited >= TICK_SECONDS - 1e-6:
            self._turn()
            waited = 0.0
        self.after(TICK_SECONDS - waited, self._tick)

    def _turn(self) -> None:
        self._woken = False
        self._last = self.world.now
        events, self._events = self._events, []
        while True:
            unreachable: list[Event] = [
                Unreachable(send.peer)
                for send in self.core.handle(events, UPTIME + self.world.now)
                if not self._network.send(self, send.message, send.peer)
            ]
            if not unreachable:
                break
            events = unreachable
        if self.core.due < inf:
            self.after(self.core.due - UPTIME - self.world.now, self._wake)


class GatewayProcess(Process):
    """`pagefleet_gateway.cell.client` around the real link."""

    def __init__(self, network: Network, name: str, incarnation: int) -> None:
        super().__init__(network.world, name, incarnation)
        self.link = SchedulerLink(self.world.now)
        self.clients: dict[str, Client] = {}
        self._network = network
        network.add(self)
        self.after(0.0, self._beat)

    def receive(self, sender: bytes, message: Message) -> None:
        self._carry_out(self.link.handle(message, self.world.now))  # type: ignore[arg-type]

    def open(self, client: Client) -> None:
        """A client asks."""
        self.clients[client.submit.request] = client
        self._carry_out(self.link.submit(client.submit, self.world.now))

    def abort(self, client: Client, choices: Iterable[int] | None) -> None:
        """A client leaves, or a stop string has ended some choices."""
        client.leave(choices)
        self._carry_out(self.link.abort(client.submit.request, choices))

    def leave(self) -> None:
        """SIGTERM, when the time for its streams is over."""
        self._carry_out(self.link.leave())
        self.die()
        self.mute_after = inf

    def _beat(self) -> None:
        self._carry_out(self.link.tick(self.world.now))
        self.link.check()
        self.after(BEAT_SECONDS, self._beat)

    def _carry_out(self, reaction: Reaction) -> None:
        for message in reaction.messages:
            self._network.send(self, message)
        for news in reaction.news:
            client = self.clients[news.request]
            client.take(news, self.world.now)
            if isinstance(news, Output):
                self.after(client.pace, partial(self._read, news))

    def _read(self, output: Output) -> None:
        """The client has read what came."""
        read = output.position + len(output.tokens) // 4
        self._carry_out(self.link.taken(output.request, output.choice, read))


class Poison:
    """A request that ends whatever computes it, once it has some tokens."""

    def __init__(self, seed: int | None, tokens: int, crash: Callable[[Process], None]) -> None:
        self.crash = crash
        self._seed = seed
        self._tokens = tokens
        self._deadly: dict[int, int] = {}
        """From which position on, by slot."""

    def forget(self) -> None:
        """A worker begins an epoch."""
        self._deadly.clear()

    def is_in(self, plan: Plan) -> bool:
        """Whether a step computes it; to be asked of all steps in their order."""
        for slot in unpack_ints(plan.release):
            self._deadly.pop(slot, None)
        for order in plan.opens:
            if order.params.seed == self._seed:
                self._deadly[order.slot] = len(order.prompt) // 4 + self._tokens
        rows = unpack_ints(plan.rows)
        fields = zip(*(rows[column::ROW_FIELDS] for column in range(3)), strict=True)
        return any(
            start + count >= self._deadly.get(slot, 1 << 30) for slot, start, count in fields
        )


class WorkerProcess(Process):
    """`pagefleet_worker.server` around the real membership and an EchoEngine."""

    def __init__(
        self,
        network: Network,
        name: str,
        incarnation: int,
        facts: EngineFacts,
        step_seconds: Callable[[], float],
        poison: "Poison",
    ) -> None:
        super().__init__(network.world, name, incarnation)
        self.membership = Membership(facts.hello("host", 1000 + incarnation, incarnation))
        self.failures: deque[str] = deque()
        """What is to go wrong in its next steps: an exception, an error of the first row, or a
        wrong token that nothing announces."""
        self.stuck_until = 0.0
        self.poison = poison
        self._network = network
        self._engine = EchoEngine(facts, DECODER, self._advance)
        self._step_seconds = step_seconds
        self._orders: deque[int | Plan] = deque()
        self._epoch: int | None = None
        self._computing = False
        self._progress = 0
        self._alarm = inf
        network.add(self)
        self.after(0.0, self._turn)

    def receive(self, sender: bytes, message: Message) -> None:
        self._carry_out(self.membership.handle(message))  # type: ignore[arg-type]
        self._turn()

    def leave(self) -> None:
        """SIGTERM."""
        self._carry_out(self.membership.leave())
        self.die()
        self.mute_after = inf

    def _turn(self) -> None:
        self._carry_out(self.membership.tick(self.world.now, self._progress))
        self.membership.check()
        if self.membership.due < self._alarm:
            self._alarm = self.membership.due
            self.after(max(0.0, self._alarm - self.world.now), self._ring)

    def _ring(self) -> None:
        self._alarm = inf
        self._turn()

    def _carry_out(self, reaction: WorkerReaction) -> None:
        self._orders += reaction.orders
        for message in reaction.messages:
            if not self._network.send(self, message):
                self.membership.unsent(message, self.world.now)
        self._compute()

    # --- the compute thread ---------------------------------------------------------------------

    def _advance(self) -> None:
        self._progress += 1

    def _compute(self) -> None:
        while self._orders and not self._computing:
            order = self._orders.popleft()
            if isinstance(order, int):
                self._epoch = order
                self._engine.reset()
                self.poison.forget()
                continue
            self._computing = True
            result = self._step(order) if order.epoch == self._epoch else None
            if result is None:
                self._epoch = None
            self.after(self._step_seconds(), partial(self._computed, order, result))

    def _step(self, plan: Plan) -> Result | None:
        result = self._engine.launch(plan).result()
        failure = self.failures.popleft() if self.failures else None
        if failure == "step":
            self.world.tell(self.name, f"fails in step {plan.step}")
            return None
        if failure == "row":
            self.world.tell(self.name, f"fails in a row of step {plan.step}")
            return msgspec.structs.replace(result, errors=[RowError(0, "it was made to fail")])
        if failure == "lie":
            self.world.tell(self.name, f"lies about step {plan.step}")
            return msgspec.structs.replace(
                result, tokens=bytes([result.tokens[0] ^ 1]) + result.tokens[1:]
            )
        return result

    def _computed(self, plan: Plan, result: Result | None) -> None:
        if self.poison.is_in(plan):
            self.poison.crash(self)
            return
        if self.world.now < self.stuck_until:
            self.after(self.stuck_until - self.world.now, partial(self._computed, plan, result))
            return
        self._progress += 1
        self._computing = False
        self._carry_out(self.membership.computed(plan, result))
        self._turn()
