"""The three cores of the protocol, joined by a network that damages what it carries.

    gateway: SchedulerLink <-- network --> Scheduler <-- network --> worker: Membership, EchoEngine

The parties are the real ones; clients ask, read and leave at random, so that damage meets them in
every state. Frames are damaged, doubled, dropped, delayed and invented, always under a right
checksum: this is the network of a peer that is wrong, not of a line that is bad.
"""

import random
from collections import deque
from collections.abc import Iterable
from uuid import UUID

from pagefleet import wire
from pagefleet.params import Guide, SamplingParams
from pagefleet_gateway.cell.link import Reaction, SchedulerLink
from pagefleet_scheduler.core import Arrived, Lost, Scheduler
from pagefleet_scheduler.queue import Room
from pagefleet_worker.interface import EngineFacts, PlanError
from pagefleet_worker.membership import Membership
from pagefleet_worker.simulated.echo import EchoEngine
from pagefleet_worker.simulated.echo_decoder import echo_tokens
from tests.echo_cell import DECODER
from tests.fuzz.frames import Frames

FACTS = EngineFacts("echo", "echo", 4, 40, 8, 200, 32, 200, 8, 1.0, 1.0)
VOCABULARY = 200
_OPEN = 6
"""Requests that the clients of a gateway have open, at most."""
_SILENCE = 5.0
"""Seconds after which whoever is silent is gone."""
_SETTLE_TURNS = 4000


class GatewayParty:
    """A gateway; its clients ask, read and leave as `draw` has it, or do nothing by themselves."""

    def __init__(self, now: float, draw: random.Random | None = None) -> None:
        self.link = SchedulerLink(now)
        self.answers: dict[str, dict[int, list[int]]] = {}
        """Tokens of each choice of every request that was asked and not aborted."""
        self.open: dict[str, set[int]] = {}
        self._draw = draw
        self._beat_due = now

    def ask(self, submit: wire.Submit, now: float) -> list[wire.Message]:
        """A client asks."""
        indices = [choice.index for choice in submit.choices]
        self.open[submit.request] = set(indices)
        self.answers[submit.request] = {index: [] for index in indices}
        return self._take(self.link.submit(submit, now))

    def turn(self, now: float) -> list[wire.Message]:
        """Something that its clients do, and its beat."""
        messages = [] if self._draw is None else self._live(self._draw, now)
        if now >= self._beat_due:
            self._beat_due = now + 0.2
            messages += self._take(self.link.tick(now))
        return messages

    def receive(self, frame: bytes, now: float) -> list[wire.Message]:
        """Take a frame in.

        Raises:
            WireError: it is no message.
        """
        message = wire.decode_to_gateway(frame)
        if isinstance(message, wire.Snapshot):
            return []
        return self._take(self.link.handle(message, now))

    def check(self) -> None:
        self.link.check()

    def _live(self, draw: random.Random, now: float) -> list[wire.Message]:
        messages = []
        if len(self.open) < _OPEN and draw.random() < 0.3:
            messages += self.ask(random_submit(draw), now)
        if self.open and draw.random() < 0.05:
            request = draw.choice(list(self.open))
            choices = draw.choice((None, [draw.choice(list(self.open[request]))]))
            messages += self._take(self.link.abort(request, choices))
            self._end(request, self.open[request] if choices is None else choices)
        return messages

    def _take(self, reaction: Reaction) -> list[wire.Message]:
        """What is to be sent; clients read their news."""
        messages: list[wire.Message] = [*reaction.messages]
        for news in reaction.news:
            if news.request not in self.open:
                continue
            if isinstance(news, wire.Rejected):
                self._end(news.request, self.open[news.request])
            elif isinstance(news, wire.Output) and news.choice in self.open[news.request]:
                answer = self.answers[news.request][news.choice]
                answer += wire.unpack_ints(news.tokens)
                messages += self.link.taken(news.request, news.choice, len(answer)).messages
                if news.finish is not None:
                    self._end(news.request, [news.choice])
        return messages

    def _end(self, request: str, choices: Iterable[int]) -> None:
        self.open[request] = self.open[request] - set(choices)
        if not self.open[request]:
            del self.open[request]


class WorkerParty:
    """A worker that computes what it is ordered at once."""

    def __init__(self) -> None:
        self._engine = EchoEngine(FACTS, DECODER, lambda: None)
        self._membership = Membership(FACTS.hello("host", pid=1, started=1))
        self._epoch: int | None = None
        self._progress = 0

    def turn(self, now: float) -> list[wire.Message]:
        """Its beat."""
        self._progress += 1
        return list(self._membership.tick(now, self._progress).messages)

    def receive(self, frame: bytes, now: float) -> list[wire.Message]:
        """Take a frame in.

        Raises:
            WireError: it is no message.
        """
        reaction = self._membership.handle(wire.decode_to_worker(frame))
        messages = list(reaction.messages)
        for order in reaction.orders:
            if isinstance(order, int):
                self._epoch = order
                self._engine.reset()
            else:
                messages += self._membership.computed(order, self._computed(order)).messages
        return messages

    def check(self) -> None:
        self._membership.check()

    def _computed(self, plan: wire.Plan) -> wire.Result | None:
        """As `pagefleet_worker.compute.Compute` does it."""
        if plan.epoch != self._epoch:
            return None
        try:
            return self._engine.launch(plan).result()
        except PlanError:
            self._epoch = None
            return None


class Network:
    """All parties, and the frames between them."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.damage = 0.3
        """Share of the frames that do not arrive as they were sent."""
        self.delivered = self.refused = 0
        self.now = 0.0
        drafts, queued = self.draw.choice((0, 4)), self.draw.choice((4, 10_000))
        self.scheduler = Scheduler(1 << 30, check=True, drafts=drafts, room=Room(queued))
        self.parties: dict[bytes, GatewayParty | WorkerParty] = {
            **{f"gateway {n}".encode(): GatewayParty(0.0, self.draw) for n in range(2)},
            **{f"worker {n}".encode(): WorkerParty() for n in range(2)},
        }
        self._frames = Frames(self.draw)
        self._up: deque[tuple[bytes, bytes]] = deque()
        self._down: deque[tuple[bytes, bytes]] = deque()

    def turn(self) -> None:
        """Time goes on, everybody may act, and some of what is under way arrives."""
        self.now += self.draw.choice((0.0, 0.001, 0.02, 0.1, 0.2))
        for peer, party in self.parties.items():
            self._send(self._up, peer, party.turn(self.now))
        if self.draw.random() < self.damage / 4:
            peer = self.draw.choice([*self.parties, b"stranger"])
            self._up.append((peer, wire.sealed(self._frames.message())))
        events: list[Arrived | Lost] = []
        for peer, frame in self._arriving(self._up):
            decode = wire.decode_from_worker if peer[:1] == b"w" else wire.decode_from_gateway
            try:
                events.append(Arrived(peer, decode(frame)))
            except wire.WireError:
                self.refused += 1
        for send in self.scheduler.handle(events, self.now):
            self._send(self._down, send.peer, [send.message])
        for peer, frame in self._arriving(self._down):
            if party := self.parties.get(peer):
                try:
                    self._send(self._up, peer, party.receive(frame, self.now))
                except wire.WireError:
                    self.refused += 1
                party.check()

    def _send(
        self, line: deque[tuple[bytes, bytes]], peer: bytes, messages: list[wire.Message]
    ) -> None:
        for message in messages:
            frame = wire.encode(message)
            if self.draw.random() < self.damage:
                match self.draw.randrange(4):
                    case 0:
                        continue
                    case 1:
                        line.append((peer, frame))
                    case _:
                        frame = wire.sealed(self._frames.damaged(bytes(wire.unsealed(frame))))
            line.append((peer, frame))

    def _arriving(self, line: deque[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """In their order, but for those that are overtaken."""
        arriving = [line.popleft() for _ in range(min(len(line), self.draw.randint(1, 8)))]
        if self.draw.random() < self.damage / 4:
            self.draw.shuffle(arriving)
        self.delivered += len(arriving)
        return arriving

    def assert_serves(self) -> None:
        """When all have fallen silent, a new gateway's request is computed by a new worker."""
        self.damage = 0.0
        party = GatewayParty(self.now)
        self.parties = {b"gateway new": party, b"worker new": WorkerParty()}
        self._up.clear()
        silent = self.now + _SILENCE
        while self.now < silent:
            self.turn()
        params = SamplingParams(max_tokens=20, seed=self.draw.randrange(2**64))
        prompt = self.draw.choices(range(VOCABULARY), k=30)
        choices = [wire.ChoiceState(index) for index in range(2)]
        submit = wire.Submit("new", 0, wire.pack_ints(prompt), params, choices)
        self._send(self._up, b"gateway new", party.ask(submit, self.now))
        turns = 0
        while party.open:
            self.turn()
            turns += 1
            assert turns < _SETTLE_TURNS, repr(self.scheduler)
        for index, tokens in party.answers["new"].items():
            assert tokens == echo_tokens(DECODER, prompt, params, index).tokens


def random_submit(draw: random.Random) -> wire.Submit:
    """A request as gateways make them."""
    choices = draw.choice((1, 1, 2, 4))
    form = draw.choice(
        (
            {"temperature": 0.0},
            {"logprobs": 2, "prompt_logprobs": 1},
            {"beam_width": choices, "temperature": 0.0},
            {"repetition_penalty": 1.3, "stop_token_ids": tuple(draw.sample(range(VOCABULARY), 9))},
            {"guide": Guide('start: "a" | "b" start'), "eos_token_ids": (3,)},
        )
    )
    params = SamplingParams(
        max_tokens=draw.randint(1, 12),
        seed=draw.randrange(2**64),
        adapter=draw.choice((0, 0, 1)),
        **form,
    )
    prompt = draw.choices(range(20), k=draw.randint(1, 40))
    return wire.Submit(
        UUID(int=draw.getrandbits(128)).hex,
        0,
        wire.pack_ints(prompt),
        params,
        [wire.ChoiceState(index) for index in range(choices)],
        priority=draw.choice((0, 0, -1, 5)),
        left=draw.choice((None, None, 0.3, 60.0)),
        window=0 if params.beam_width else draw.choice((0, 4)),
    )
