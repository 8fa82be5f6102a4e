"""A scheduler for a handful of sequences: drives an engine by hand-made plans.

It hands out blocks in a random order, feeds every sequence in chunks of a given size, and keeps
what each one was given. With `lookahead` it orders the next step before it reads the last one's
result, as a scheduler does.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagefleet.params import SamplingParams
from pagefleet.wire import SAMPLED, Floats, Logprobs, Open, Plan, checksum, pack_ints, unpack_ints
from pagefleet_worker.interface import Engine, Launched


@dataclass
class Stream:
    """One sequence: its prompt, and everything that came of it."""

    slot: int
    prompt: list[int]
    params: SamplingParams
    choices: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    embedding: Floats | None = None
    errors: list[str] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    fed: int = 0
    """Input tokens ordered so far."""
    asked: int = 0
    """Samples ordered so far."""

    @property
    def done(self) -> bool:
        fed = self.fed >= len(self.prompt)
        return (fed and self.asked >= self.params.max_tokens) or bool(self.errors)


@dataclass
class Flight:
    """A step whose result has not been read: its streams, and those of its samples in order."""

    launched: Launched
    streams: list[Stream]
    samples: list[Stream]

    def land(self) -> None:
        """Read the result into the streams."""
        result = self.launched.result()
        for stream, token in zip(self.samples, unpack_ints(result.tokens), strict=True):
            stream.output.append(token)
        for index, logprobs in result.logprobs:
            self.samples[index].logprobs.append(logprobs)
        for prompt in result.prompts:
            stream = self.streams[prompt.row]
            stream.prompt_logprobs.append((prompt.position, prompt.logprobs))
        for row, embedding in result.embeddings:
            assert self.streams[row].embedding is None
            self.streams[row].embedding = embedding
        for error in result.errors:
            self.streams[error.row].errors.append(error.text)


class Driver:
    """Runs streams on one engine, in an epoch of its own."""

    def __init__(
        self, engine: Engine, *, chunk: int = 1 << 20, lookahead: bool = False, seed: int = 0
    ) -> None:
        self.engine = engine
        self.chunk = chunk
        self.lookahead = lookahead
        self.free = list(range(engine.facts.blocks))
        random.Random(seed).shuffle(self.free)
        self.slots = 0
        self.steps = 0
        self.opens: list[Open] = []
        self.forks: list[int] = []
        self.deltas: list[int] = []
        self.copies: list[int] = []
        engine.reset()

    def open(
        self, prompt: list[int], params: SamplingParams, choices: Sequence[int] = (0,)
    ) -> Stream:
        """Begin a stream with the next step."""
        stream = Stream(self.slots, prompt, params, list(choices))
        self.slots += 1
        self.opens.append(Open(stream.slot, params, pack_ints(prompt), b"", stream.choices))
        return stream

    def fork(self, stream: Stream, choice: int, first: int) -> Stream:
        """One choice of a stream goes on from its `first` token, with the next step, in blocks of
        which only the last, if it is not full, is its own.
        """
        twin = Stream(
            self.slots, stream.prompt, stream.params, [choice], [first], fed=stream.fed, asked=1
        )
        self.slots += 1
        self.forks += [twin.slot, stream.slot, choice]
        twin.table = list(stream.table)
        if stream.fed % self.engine.facts.block_size:
            twin.table[-1] = self.free.pop()
            self.copies += [stream.table[-1], twin.table[-1]]
            self.deltas += [twin.slot, len(twin.table) - 1, twin.table[-1]]
        return twin

    def step(self, streams: Sequence[Stream], logits: int = 1) -> Flight:
        """Launch a step in which every stream goes on by one chunk; where that reaches its end,
        the last positions are sampled, as many as `logits` says.
        """
        rows: list[int] = []
        tokens: list[int] = []
        samples: list[Stream] = []
        for stream in streams:
            known = [*stream.prompt, *stream.output]
            known += [SAMPLED] * (stream.asked - len(stream.output))
            inputs = known[stream.fed : stream.fed + self.chunk]
            tokens += inputs
            start, stream.fed = stream.fed, stream.fed + len(inputs)
            while len(stream.table) * self.engine.facts.block_size < stream.fed:
                stream.table.append(self.free.pop())
                self.deltas += [stream.slot, len(stream.table) - 1, stream.table[-1]]
            last = stream.fed == len(known) and stream.params.max_tokens > 0
            stream.asked += last
            samples += [stream] * last * logits * len(stream.choices)
            crc = checksum(pack_ints(stream.table))
            rows += [stream.slot, start, len(inputs), last * logits, len(stream.table), crc]
        return Flight(self._launch(rows, tokens), list(streams), samples)

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Stream]:
        """Serve all prompts together until each has its `max_tokens`, then release their slots."""
        streams = [self.open(*each) for each in zip(prompts, params, strict=True)]
        flights: list[Flight] = []
        while running := [stream for stream in streams if not stream.done]:
            flights.append(self.step(running))
            while len(flights) > self.lookahead:
                flights.pop(0).land()
        for flight in flights:
            flight.land()
        self._launch([], [], release=[stream.slot for stream in streams])
        return streams

    def _launch(self, rows: list[int], tokens: list[int], release: Sequence[int] = ()) -> Launched:
        self.steps += 1
        plan = Plan(
            epoch=1,
            step=self.steps,
            rows=pack_ints(rows),
            tokens=pack_ints(tokens),
            release=pack_ints(release),
            opens=self.opens,
            forks=pack_ints(self.forks),
            tables=pack_ints(self.deltas),
            copies=pack_ints(self.copies),
        )
        self.opens, self.forks, self.deltas, self.copies = [], [], [], []
        return self.engine.launch(plan)
