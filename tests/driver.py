"""A scheduler for a handful of sequences: drives an engine by hand-made plans.

It hands out blocks in a random order, feeds every sequence in chunks of a given size, and keeps
what each one was given. With `lookahead` it orders the next step before it reads the last one's
result, as a scheduler does.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagefleet.params import SamplingParams
from pagefleet.wire import SAMPLED, Logprobs, Open, Plan, Result, checksum, pack_ints, unpack_ints
from pagefleet_worker.interface import Engine, Launched


@dataclass
class Stream:
    """One sequence: its prompt, and everything that came of it."""

    slot: int
    prompt: list[int]
    params: SamplingParams
    choice: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    fed: int = 0
    asked: int = 0

    @property
    def done(self) -> bool:
        return self.asked >= self.params.max_tokens or bool(self.errors)


class Driver:
    """Runs streams on one engine."""

    def __init__(
        self, engine: Engine, *, chunk: int = 1 << 20, lookahead: bool = False, seed: int = 0
    ) -> None:
        self.engine = engine
        self.chunk = chunk
        self.lookahead = lookahead
        self.free = list(range(engine.facts.blocks))
        random.Random(seed).shuffle(self.free)
        self.steps = 0
        engine.reset()

    def run(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Stream]:
        """Serve all prompts together until each has its `max_tokens`."""
        wanted = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        streams = [
            Stream(slot, prompt, each)
            for slot, (prompt, each) in enumerate(zip(prompts, wanted, strict=True))
        ]
        opens = [Open(s.slot, s.params, pack_ints(s.prompt), b"", [s.choice]) for s in streams]
        before: tuple[Launched, list[tuple[Stream, bool]]] | None = None
        while running := [stream for stream in streams if not stream.done]:
            plan, asked = self.plan(running, opens)
            launched = self.engine.launch(plan)
            opens = []
            if before is not None:
                self._take(*before)
            before = (launched, asked)
            if not self.lookahead:
                self._take(*before)
                before = None
        if before is not None:
            self._take(*before)
        self._close(streams)
        return streams

    def plan(
        self, streams: Sequence[Stream], opens: list[Open]
    ) -> tuple[Plan, list[tuple[Stream, bool]]]:
        """One step in which every stream goes on by one chunk; and which of them sample."""
        rows: list[int] = []
        tokens: list[int] = []
        deltas: list[int] = []
        asked = []
        for stream in streams:
            known = [*stream.prompt, *stream.output]
            if stream.asked > len(stream.output):
                known.append(SAMPLED)
            inputs = known[stream.fed : stream.fed + self.chunk]
            end = stream.fed + len(inputs)
            while len(stream.table) * self.engine.facts.block_size < end:
                stream.table.append(self.free.pop())
                deltas += [stream.slot, len(stream.table) - 1, stream.table[-1]]
            samples = end == len(known)
            crc = checksum(pack_ints(stream.table))
            rows += [stream.slot, stream.fed, len(inputs), samples, len(stream.table), crc]
            tokens += inputs
            asked.append((stream, samples))
            stream.fed, stream.asked = end, stream.asked + samples
        self.steps += 1
        plan = Plan(
            epoch=1,
            step=self.steps,
            rows=pack_ints(rows),
            tokens=pack_ints(tokens),
            opens=opens,
            tables=pack_ints(deltas),
        )
        return plan, asked

    def _take(self, launched: Launched, asked: list[tuple[Stream, bool]]) -> Result:
        result = launched.result()
        sampled = [stream for stream, samples in asked if samples]
        for stream, token in zip(sampled, unpack_ints(result.tokens), strict=True):
            stream.output.append(token)
        for index, logprobs in result.logprobs:
            sampled[index].logprobs.append(logprobs)
        for prompt in result.prompts:
            asked[prompt.row][0].prompt_logprobs.append((prompt.position, prompt.logprobs))
        for error in result.errors:
            asked[error.row][0].errors.append(error.text)
        return result

    def _close(self, streams: list[Stream]) -> None:
        self.steps += 1
        release = pack_ints([stream.slot for stream in streams])
        self.engine.launch(Plan(epoch=1, step=self.steps, rows=b"", tokens=b"", release=release))
        for stream in streams:
            self.free += stream.table
