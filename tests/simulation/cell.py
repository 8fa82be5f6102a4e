"""A simulated cell that lives through a scenario, and the verdict on it.

The verdict is that of a client and of an operator. Every stream that was asked for is the one of
the oracle, whole, unless its gateway died or it may be refused. When all faults are over, the cell
comes to rest within `RECOVERY` seconds: nothing is open anywhere, every block is free, no worker
computes. The invariants of the scheduler, the gateways and the workers held all the time.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import msgspec

from pagefleet.wire import Submit
from pagefleet_scheduler.queue import DEFAULT_ROOM, Room
from pagefleet_worker.interface import EngineFacts
from tests.simulation.clients import LONGEST, Client
from tests.simulation.faults import Fault
from tests.simulation.network import SCHEDULER, Latency, Moment, Network
from tests.simulation.parties import GatewayProcess, Poison, SchedulerProcess, WorkerProcess
from tests.simulation.world import Process, World

RECOVERY = 6.0
"""Virtual seconds after the last fault within which everything is done and free, besides those that
a lone worker would take for all that was asked for."""

GLANCE = 0.05
"""Virtual seconds between two looks whether the cell is at rest."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A request to be made."""

    time: float
    gateway: int
    submit: Submit
    refusals: frozenset[str] = frozenset()
    pace: float = 0.0
    resumes: float | None = None
    """Seconds after which its client goes on at the next gateway, if it loses its own."""

    def again(self, gateways: int, client: Client) -> "Wish":
        """The same with `Last-Event-ID`, at the next gateway."""
        before = self.submit.request
        submit = msgspec.structs.replace(
            self.submit, request=f"{before}+", continues=before, choices=client.had()
        )
        return replace(self, gateway=(self.gateway + 1) % gateways, submit=submit)


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a run depends on."""

    seed: int
    wishes: list[Wish]
    faults: list[Fault] = field(default_factory=list)
    workers: int = 2
    gateways: int = 1
    blocks: int = 40
    lacking: int = 0
    """Of them, at the last worker."""
    block_sizes: tuple[int, ...] = (4,)
    """Workers have them in turn; those with another size than the first have as many tokens."""
    slots: int = 6
    budget: int = 16
    lookahead: bool = True
    caching: bool = True
    drafts: int = 0
    host_blocks: int = 0
    room: Room = DEFAULT_ROOM
    classes: tuple[str, ...] = ("echo",)
    """Of numerics; workers have them in turn."""
    step_seconds: tuple[float, float] = (0.002, 0.02)
    latency: Latency = field(default_factory=Latency)
    poison: int | None = None
    """Seed of a request that ends every worker that computes it."""
    poison_tokens: int = 0
    """Tokens that it gets before."""

    @property
    def work(self) -> float:
        """Seconds that it takes to compute everything, one token after another."""
        step = self.step_seconds[1] + 2 * self.latency.most
        tokens = sum(
            len(wish.submit.choices) * wish.submit.params.max_tokens
            + len(wish.submit.prompt) // 4 / self.budget
            for wish in self.wishes
        )
        return tokens * step + sum(
            wish.pace * wish.submit.params.max_tokens for wish in self.wishes
        )


class SimulationFailure(AssertionError):
    """A scenario went wrong; tells its story."""


class Cell:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed)
        self.network = Network(self.world, scenario.latency)
        self.running: dict[str, Process] = {}
        self.clients: list[Client] = []
        self.struck: list[Fault] = []
        self.crashes = 0
        """Of workers by the poison."""
        self._wishes: dict[str, Wish] = {}
        self._homes: dict[str, GatewayProcess] = {}
        self._incarnations: Counter[str] = Counter()
        self._troubled_until = 0.0
        self._unmet = 0
        self._at_rest = False

    def live(self) -> None:
        """Run to the end.

        Raises:
            SimulationFailure: the verdict is bad.
        """
        try:
            self._begin()
            while not self.world.run(lambda: self._at_rest, limit := self._limit()):
                assert self._limit() > limit, f"no rest: {self._unrest()}"
        except Exception as error:
            raise SimulationFailure(self._tell(error)) from error

    # --- what faults do -------------------------------------------------------------------------

    def hold(self, seconds: float) -> None:
        """Expect no rest for so long."""
        self._troubled_until = max(self._troubled_until, self.world.now + seconds)

    def die(self, process: Process) -> None:
        """End a process; the clients of a gateway are gone with it, or go on at another."""
        process.die()
        self._gone(process)

    def _gone(self, process: Process) -> None:
        del self.running[process.name]
        for client in tuple(self.clients):
            if client.open and self._homes[client.submit.request] is process:
                wish = self._wishes[client.submit.request]
                if wish.resumes is not None:
                    self._ask_later(wish.again(self.scenario.gateways, client), wish.resumes)
                client.leave(None)

    def reconnect(self, request: str, closes: bool) -> None:
        """A client goes on at the next gateway; its old one sees it leave, or does not."""
        gateway, wish = self._homes.get(request), self._wishes.get(request)
        if gateway is None or wish is None or request not in gateway.clients:
            return
        client = gateway.clients[request]
        if client.open and "moved" not in client.refusals:
            client.refusals |= {"moved"}
            self._wishes[request] = replace(wish, resumes=None)
            self.world.tell(request, "goes on at another gateway")
            if closes:
                self.leave(request, None)
            self._ask_later(wish.again(self.scenario.gateways, client), 0.01)

    def terminate(self, process: Process) -> None:
        """Ask a process to end."""
        assert isinstance(process, WorkerProcess | GatewayProcess | SchedulerProcess)
        process.leave()
        self._gone(process)

    def start_later(self, name: str, seconds: float) -> None:
        """Let a new process take the place of one that has ended."""
        self.hold(seconds)
        self.world.after(seconds, partial(self._start, name))

    def report_death(self, address: bytes) -> None:
        """The kernel tells the scheduler of the end of a process that it watches."""
        scheduler = self.running.get(SCHEDULER)
        if isinstance(scheduler, SchedulerProcess):
            scheduler.after(0.0, partial(scheduler.lose, address))

    def disconnect(self, process: Process) -> None:
        """ZeroMQ gives a connection up; those of the scheduler are all."""
        if process.stopped:
            for each in self._connected(process):
                each.connected_from = inf

    def resume(self, process: Process) -> None:
        """SIGCONT."""
        for each in self._connected(process):
            if each.connected_from == inf:
                self.network.reconnect(each)
        process.resume()

    def _connected(self, process: Process) -> list[Process]:
        return list(self.running.values()) if process.name == SCHEDULER else [process]

    def leave(self, request: str, choice: int | None) -> None:
        """A client leaves, or has enough of a choice."""
        gateway = self._homes.get(request)
        if gateway is not None:
            client = gateway.clients.get(request)
            gateway.after(0.0, partial(self._leave, gateway, client, choice))

    def _leave(self, gateway: GatewayProcess, client: Client | None, choice: int | None) -> None:
        if client is not None and client.wants(choice):
            what = "everything" if choice is None else f"choice {choice}"
            self.world.tell(client.submit.request, f"wants no more of {what}")
            gateway.abort(client, None if choice is None else [choice])

    # --- its life -------------------------------------------------------------------------------

    def _begin(self) -> None:
        scenario = self.scenario
        self._start(SCHEDULER)
        for number in range(scenario.gateways):
            self._start(f"gateway{number}")
        for number in range(scenario.workers):
            self._start(f"worker{number}")
        for wish in scenario.wishes:
            self._ask_later(wish, wish.time)
        for fault in scenario.faults:
            if isinstance(fault.when, Moment):
                self.network.watch(fault.when, partial(self._strike, fault))
            else:
                self.hold(fault.when)
                self.world.after(fault.when, partial(self._strike, fault))
        self.world.after(GLANCE, self._glance)

    def _start(self, name: str) -> None:
        number, scenario = self._incarnations[name], self.scenario
        self._incarnations[name] += 1
        self.world.tell(name, "starts")
        if name == SCHEDULER:
            self.running[name] = SchedulerProcess(
                self.network,
                number,
                lookahead=scenario.lookahead,
                caching=scenario.caching,
                drafts=scenario.drafts,
                room=scenario.room,
            )
        elif name.startswith("gateway"):
            self.running[name] = GatewayProcess(self.network, name, number)
        else:
            self.running[name] = WorkerProcess(
                self.network,
                name,
                number,
                self._facts(int(name.removeprefix("worker"))),
                self._step_seconds(),
                Poison(scenario.poison, scenario.poison_tokens, self._crash),
            )

    def _crash(self, process: Process) -> None:
        """A poison ends a worker; the next one is there soon."""
        self.crashes += 1
        self.die(process)
        self.world.after(0.002, partial(self.report_death, process.address))
        self.start_later(process.name, 0.3)

    def _facts(self, worker: int) -> EngineFacts:
        scenario = self.scenario
        block_size = scenario.block_sizes[worker % len(scenario.block_sizes)]
        blocks = scenario.blocks - scenario.lacking * (worker == scenario.workers - 1)
        return EngineFacts(
            fingerprint="echo",
            numerics=scenario.classes[worker % len(scenario.classes)],
            block_size=block_size,
            blocks=blocks * scenario.block_sizes[0] // block_size,
            slots=scenario.slots,
            max_model_len=LONGEST,
            max_batched_tokens=scenario.budget,
            vocab_size=200,
            host_blocks=scenario.host_blocks,
            swap_micros=1.0,
            compute_micros=1.0,
        )

    def _step_seconds(self) -> Callable[[], float]:
        return partial(self.world.random.uniform, *self.scenario.step_seconds)

    def _ask_later(self, wish: Wish, seconds: float) -> None:
        self._unmet += 1
        self._wishes[wish.submit.request] = wish
        self.hold(seconds)
        self.world.after(seconds, partial(self._ask, wish))

    def _ask(self, wish: Wish) -> None:
        gateway = self.running.get(f"gateway{wish.gateway}")
        if not isinstance(gateway, GatewayProcess):
            self.world.after(0.1, partial(self._ask, wish))
            return
        client = Client(wish.submit, wish.refusals, wish.pace)
        self.clients.append(client)
        self._homes[wish.submit.request] = gateway
        self._unmet -= 1
        gateway.after(0.0, partial(gateway.open, client))

    def _strike(self, fault: Fault) -> None:
        self.struck.append(fault)
        fault.strike(self)

    # --- the verdict ----------------------------------------------------------------------------

    def _limit(self) -> float:
        last = max((wish.time for wish in self.scenario.wishes), default=0.0)
        return max(self._troubled_until, last) + RECOVERY + self.scenario.work

    def _glance(self) -> None:
        self._at_rest = self.world.now > self._troubled_until and not self._unrest()
        self.world.after(GLANCE, self._glance)

    def _unrest(self) -> str | None:
        """What is not done yet."""
        if self._unmet:
            return f"{self._unmet} requests are still to be made"
        for client in self.clients:
            if client.open:
                return f"{client!r} waits"
        for process in self.running.values():
            match process:
                case SchedulerProcess():
                    if process.core.requests:
                        return f"open requests in {process.core!r}"
                    for planner in process.core.placement.planners:
                        if planner.cache.pool.held or planner.flights:
                            return f"blocks are held by {planner!r}"
                case GatewayProcess():
                    if process.link.open_requests:
                        return f"open requests in {process.link!r}"
                case WorkerProcess():
                    if process.membership.busy and process.membership.epoch is not None:
                        return f"{process.membership!r} computes"
        return None

    def _tell(self, error: Exception) -> str:
        lines = [str(incident) for incident in self.world.story]
        return "\n".join(
            [
                *lines,
                f"Seed {self.scenario.seed} failed at {self.world.now:.4f}: "
                f"{type(error).__name__}: {error}",
                f"Replay it: python -m tests.simulation {self.scenario.seed}",
            ]
        )
