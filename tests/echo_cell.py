"""A cell in one process: the real scheduler core, EchoEngines, and a gateway that compares.

Time stands still unless a test moves it; nothing happens unless a test makes it happen.
"""

import random
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagefleet.params import SamplingParams
from pagefleet.wire import (
    PROTOCOL,
    Abort,
    ChoiceState,
    Finish,
    GatewayBeat,
    Join,
    Logprobs,
    Output,
    Outputs,
    Plan,
    Rejected,
    Submit,
    WorkerHello,
    pack_ints,
    unpack_ints,
)
from pagefleet_scheduler.beam import Answer, BeamSearch
from pagefleet_scheduler.core import Arrived, Lost, Scheduler
from pagefleet_scheduler.decoding import concatenate
from pagefleet_worker.echo import EchoEngine
from pagefleet_worker.echo_decoder import Chain, EchoDecoder, echo_tokens, tenant_of
from pagefleet_worker.interface import EngineFacts
from pagefleet_worker.sparse_logits import pack_logprobs

GATEWAY = b"gateway"
DECODER = EchoDecoder(vocab_size=200, eos_token_ids=(3,))


@dataclass
class Client:
    """One request, and what has come of it."""

    submit: Submit
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[Logprobs]]
    finished: dict[int, Finish] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    rejected: Rejected | None = None

    @property
    def open(self) -> bool:
        """Whether something is still to come."""
        return self.rejected is None and self.tokens.keys() != self.finished.keys() | self.aborted


@dataclass
class Worker:
    """An engine, and the plans that wait for it."""

    engine: EchoEngine
    plans: deque[Plan] = field(default_factory=deque)


def echo_beams(prompt: Sequence[int], params: SamplingParams) -> list[Answer]:
    """A beam search on the echo model without pages, batches or forks: its oracle."""
    beams = [array("i")]
    search = BeamSearch(params)
    while not search.done:
        candidates = []
        for beam in beams:
            chain = Chain()
            for position, token in enumerate([*prompt, *beam]):
                chain.append(token, position, tenant_of(b""))
            logits = DECODER.logits(chain.digest())
            candidates.append(pack_logprobs([logits], [0], params.candidates))
        going = search.advance(beams, [[] for _ in beams], candidates)
        beams = [beams[each.beam] + array("i", [each.token]) for each in going]
    return search.answers


class EchoCell:
    """See the module's text; `check` runs after everything that happens."""

    def __init__(
        self,
        *,
        blocks: int = 40,
        slots: int = 8,
        budget: int = 32,
        block_size: int = 4,
        **options: bool,
    ) -> None:
        self.scheduler = Scheduler(1 << 30, check=True, **options)
        self.facts = EngineFacts("echo", "echo", block_size, blocks, slots, 200, budget, 200)
        self.workers: dict[bytes, Worker] = {}
        self.clients: dict[str, Client] = {}
        self.now = 0.0
        self.steps = 0

    # --- what happens ---------------------------------------------------------------------------

    def join(self) -> bytes:
        """A worker joins."""
        name = f"worker {len(self.workers)} {random.random()}".encode()
        self.workers[name] = Worker(EchoEngine(self.facts, DECODER, lambda: None))
        facts = self.facts
        hello = WorkerHello(
            PROTOCOL, "host", 1, 1, facts.fingerprint, facts.numerics, facts.block_size,
            facts.blocks, facts.slots, facts.max_model_len, facts.max_batched_tokens, 200,
        )  # fmt: skip
        self._handle(Arrived(name, hello))
        return name

    def kill(self, name: bytes) -> None:
        """A worker dies."""
        del self.workers[name]
        self._handle(Lost(name))

    def submit(
        self, prompt: list[int], params: SamplingParams, choices: int = 1, salt: bytes = b""
    ) -> str:
        """A request comes; returns its id."""
        request = f"r{len(self.clients)}"
        submit = Submit(
            request, 1, pack_ints(prompt), params, [ChoiceState(n) for n in range(choices)],
            salt=salt,
        )  # fmt: skip
        self.clients[request] = Client(
            submit, {n: [] for n in range(choices)}, {n: [] for n in range(choices)}
        )
        self._handle(Arrived(GATEWAY, submit))
        return request

    def abort(self, request: str, choices: list[int] | None = None) -> None:
        """A client leaves, or is content with what it has of some choices."""
        client = self.clients[request]
        client.aborted |= set(choices or client.tokens)
        self._handle(Arrived(GATEWAY, Abort(request, 1, choices or [])))

    def step(self, name: bytes) -> bool:
        """A worker computes its next plan, if it has one."""
        worker = self.workers[name]
        if not worker.plans:
            return False
        self.steps += 1
        result = worker.engine.launch(worker.plans.popleft()).result()
        self._handle(Arrived(name, result))
        return True

    def run(self, limit: int = 20_000) -> None:
        """Compute until nothing is left to compute."""
        for _ in range(limit):
            if not [name for name in list(self.workers) if self.step(name)]:
                return
        raise AssertionError(f"no end after {limit} rounds: {self.scheduler!r}")

    # --- what must hold -------------------------------------------------------------------------

    def compare(self) -> None:
        """Every stream is the one of the oracle, whole if it has ended."""
        for client in self.clients.values():
            if client.submit.params.beam_width:
                self._compare_beams(client)
                continue
            for choice, tokens in client.tokens.items():
                submit = client.submit
                expected = echo_tokens(
                    DECODER, unpack_ints(submit.prompt), submit.params, choice, submit.salt
                )
                assert tokens == expected.tokens[: len(tokens)], (submit.request, choice)
                if choice in client.finished:
                    assert tokens == expected.tokens
                assert concatenate(client.logprobs[choice]) == concatenate(
                    expected.logprobs[: len(tokens)]
                )

    def _compare_beams(self, client: Client) -> None:
        answers = echo_beams(unpack_ints(client.submit.prompt), client.submit.params)
        for choice in client.finished:
            assert client.tokens[choice] == list(answers[choice].tokens), client.submit.request

    def assert_idle(self) -> None:
        """Everybody got an answer, and every block is free."""
        assert not [client for client in self.clients.values() if client.open]
        assert not self.scheduler.requests
        for planner in self.scheduler.placement.planners:
            assert planner.pool.held == 0
            assert not planner.flights

    def _handle(self, *events: Arrived | Lost) -> None:
        beat = Arrived(GATEWAY, GatewayBeat([]))
        for send in self.scheduler.handle([*events, beat], self.now):
            match send.message:
                case Join():
                    self.workers[send.peer].engine.reset()
                    self.workers[send.peer].plans.clear()
                case Plan():
                    self.workers[send.peer].plans.append(send.message)
                case Outputs():
                    for item in send.message.items:
                        self._take(self.clients[item.request], item.choice, item)
                case Rejected():
                    self.clients[send.message.request].rejected = send.message

    def _take(self, client: Client, choice: int, item: Output) -> None:
        if choice in client.aborted:
            return
        assert choice not in client.finished
        assert item.position == len(client.tokens[choice])
        client.tokens[choice] += array("i", unpack_ints(item.tokens)).tolist()
        if item.logprobs is not None:
            client.logprobs[choice].append(item.logprobs)
        if item.finish is not None:
            client.finished[choice] = item.finish
