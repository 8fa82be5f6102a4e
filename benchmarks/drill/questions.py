"""Requests to an echo cell, in every form, each with the answer that it must have."""

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from pagefleet.manifest import Manifest
from pagefleet.params import SamplingParams
from pagefleet_gateway.tenants import prefix_salt
from pagefleet_worker.simulated.echo_decoder import EchoDecoder, echo_tokens

FORMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95},
    "penalized": {"temperature": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "n=2": {"temperature": 1, "n": 2},
    "logprobs": {"temperature": 1, "logprobs": 3},
    "repeating": {"temperature": 1, "allowed_token_ids": (66, 67)},
    "beam": {"temperature": 0, "use_beam_search": True, "beam_width": 3, "n": 2},
    "guided": {"temperature": 1, "structured_outputs": {"regex": "[a-m ]{200}"}},
}
"""Fields of a body; each asks for something else that must survive. One that repeats itself is
drafted."""

SAMPLED = ("greedy", "seeded", "penalized", "n=2", "logprobs", "repeating")
"""The forms whose answers the oracle knows."""


@dataclass(frozen=True)
class Question:
    """A request for `/v1/completions` that does not end before `max_tokens`."""

    prompt: list[int]
    max_tokens: int
    seed: int
    form: str = "greedy"
    stream: bool = True
    model: EchoDecoder | None = None
    adapter: int = 0
    """The LoRA adapter that is asked for, as `SamplingParams` counts them, by its name."""
    name: str | None = None
    known: list[list[int]] | None = None
    """The answer, where no oracle knows it: tokens that came without faults."""

    @property
    def choices(self) -> int:
        """Answers that it asks for."""
        choices: int = FORMS[self.form].get("n", 1)
        return choices

    @property
    def body(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(
            {
                "model": self.name,
                "prompt": self.prompt,
                "max_tokens": self.max_tokens,
                "seed": self.seed,
                "stream": self.stream,
                "ignore_eos": True,
                "return_token_ids": True,
                **FORMS[self.form],
            }
        )

    @cached_property
    def expected(self) -> list[list[int]]:
        """The tokens of each choice, as they are known or by the oracle."""
        if self.known is not None:
            return self.known
        assert self.model is not None
        fields = {name: value for name, value in FORMS[self.form].items() if name != "n"}
        params = SamplingParams(
            max_tokens=self.max_tokens, seed=self.seed, adapter=self.adapter, **fields
        )
        salt = prefix_salt(None, None, self.adapter)
        return [
            echo_tokens(self.model, self.prompt, params, choice, salt).tokens
            for choice in range(self.choices)
        ]


class Questioner:
    """Draws questions to the echo model in a prepared folder, with any of its LoRA adapters."""

    def __init__(self, folder: Path, seed: int) -> None:
        manifest = Manifest.load(folder)
        self._model = EchoDecoder(manifest.vocab_size, manifest.eos_token_ids)
        self._names = [None, *(adapter.name for adapter in manifest.adapters)]
        self._draw = random.Random(seed)

    def ask(self, form: str, prompt: int, tokens: int, *, stream: bool = True) -> Question:
        """A question of a form; `prompt` and `tokens` are lengths."""
        ids, seed = self._draw.choices(range(256), k=prompt), self._draw.randrange(2**32)
        adapter = self._draw.randrange(len(self._names))
        name = self._names[adapter]
        return Question(ids, tokens, seed, form, stream, self._model, adapter, name)

    def any(self, longest_prompt: int, longest_answer: int) -> Question:
        """A question of any length, of a form that the oracle knows."""
        form = self._draw.choice(SAMPLED)
        prompt = self._draw.randint(1, longest_prompt)
        return self.ask(form, prompt, self._draw.randint(2, longest_answer))
