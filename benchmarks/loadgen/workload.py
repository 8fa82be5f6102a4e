"""What is asked: prompts, how many tokens of an answer, and how these are sampled."""

import random
from dataclasses import dataclass

import msgspec

from benchmarks.loadgen.lengths import LengthSource
from benchmarks.loadgen.prompts import Prompt, PromptSource


@dataclass(frozen=True, slots=True)
class Request:
    """The body to send and where to; at most `output_tokens` must come back, or exactly so many."""

    route: str
    body: bytes
    output_tokens: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """Streamed requests, of lengths (at most `longest`) and prompts from two sources.

    With `ignore_eos` an answer has exactly the length drawn for it; without, it ends there at the
    latest. Above a temperature of 0 every request has a seed of its own.
    """

    model: str
    lengths: LengthSource
    longest: int
    prompts: PromptSource
    temperature: float = 0.0
    ignore_eos: bool = True

    def requests(self, count: int, seed: int, contents: str) -> list[Request]:
        """`count` requests whose lengths depend on `seed` alone, their prompts on both."""
        drawn = self.lengths.draw(count, random.Random(seed))
        lengths = [each.clipped(self.longest) for each in drawn]
        prompts = self.prompts.draw([each.prompt for each in lengths], seed, contents)
        asked = zip(prompts, lengths, strict=True)
        return [self._request(p, each.output, index) for index, (p, each) in enumerate(asked)]

    def _request(self, prompt: Prompt, output_tokens: int, seed: int) -> Request:
        body = {
            "model": self.model,
            **msgspec.to_builtins(prompt),
            "max_tokens": output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:  # of vLLM's fields: some servers refuse what they do not know
            body["ignore_eos"] = True
        if self.temperature:
            body["seed"] = seed
        return Request(prompt.route, msgspec.json.encode(body), output_tokens, self.ignore_eos)
