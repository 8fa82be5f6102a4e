"""What is asked: random prompts, so that no server finds them in its prefix cache unasked."""

import random
from dataclasses import dataclass

import msgspec

from benchmarks.loadgen.lengths import LengthSource

_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or "
    "one had by but not what all were we when your can said there use an each which she do how if "
    "will up other about out many then them these so some her would make like him into time has "
    "look two more write go see number no way could people my than first water been call who its "
    "now find long down day did get come made may part over new sound take only little work know"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Request:
    """The body to send, and how many tokens must come back."""

    body: bytes
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests for `/v1/completions`: greedy, streamed, of exactly the output length asked for.

    Every prompt begins with the same `prefix_tokens` tokens, and has as many more as its length
    says (at most `longest`, like outputs). With `vocabulary` a prompt is a list of random token ids
    below it, so its length is exact; without, a text of short words, which are one token each in
    most vocabularies.
    """

    model: str
    lengths: LengthSource
    longest: int
    prefix_tokens: int = 0
    vocabulary: int | None = None

    def requests(self, count: int, seed: int, contents: str) -> list[Request]:
        """`count` requests whose lengths and shared prefix depend on `seed` alone.

        The rest of the prompts depends on `seed` and `contents`.
        """
        drawn = self.lengths.draw(count, random.Random(seed))
        size = len(_WORDS) if self.vocabulary is None else self.vocabulary
        prefix = random.Random(seed).choices(range(size), k=self.prefix_tokens)
        rng = random.Random(f"{contents}, seed {seed}")
        requests = []
        for lengths in (each.clipped(self.longest) for each in drawn):
            prompt = prefix + rng.choices(range(size), k=lengths.prompt)
            requests.append(self._request(prompt, lengths.output))
        return requests

    def _request(self, prompt: list[int], output_tokens: int) -> Request:
        words = self.vocabulary is None
        body = {
            "model": self.model,
            "prompt": " ".join(_WORDS[index] for index in prompt) if words else prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Request(msgspec.json.encode(body), output_tokens)
