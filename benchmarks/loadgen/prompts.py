"""What the prompts say: random words or tokens, or lines of a file.

Random prompts are in no server's prefix cache unasked, and their lengths are free. But nobody asks
so, and what a model answers is like nothing that is answered to people: greedily, a small one soon
goes round in circles. Whatever depends on the text (drafts from what came before, say) wants real
prompts: a `Dataset`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Protocol

import msgspec

_TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or "
    "one had by but not what all were we when your can said there use an each which she do how if "
    "will up other about out many then them these so some her would make like him into time has "
    "look two more write go see number no way could people my than first water been call who its "
    "now find long down day did get come made may part over new sound take only little work know"
)
_WORDS = _TEXT.split()


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a request's body that ask: either a `prompt` to go on with, or `messages`.

    Raises:
        ValueError: it has neither, or both.
    """

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError('a prompt is either {"prompt": "..."} or {"messages": [...]}')

    @property
    def route(self) -> str:
        """Where it is asked."""
        return "/v1/completions" if self.messages is None else "/v1/chat/completions"


class PromptSource(Protocol):
    """Where prompts come from."""

    def draw(self, lengths: Sequence[int], seed: int, contents: str) -> list[Prompt]:
        """A prompt for each of `lengths` in tokens; they depend on `seed` and `contents`."""


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Every prompt begins with the same `prefix_tokens` tokens, and has as many more as asked for.

    With `vocabulary` it is a list of random token ids below it, so its length is exact; without, a
    text of short words, which are one token each in most vocabularies. The prefix depends on the
    seed alone.
    """

    prefix_tokens: int = 0
    vocabulary: int | None = None

    def draw(self, lengths: Sequence[int], seed: int, contents: str) -> list[Prompt]:
        """A prompt for each of `lengths`."""
        tokens = range(len(_WORDS) if self.vocabulary is None else self.vocabulary)
        prefix = random.Random(seed).choices(tokens, k=self.prefix_tokens)
        rng = random.Random(f"{contents}, seed {seed}")
        return [self._prompt(prefix + rng.choices(tokens, k=length)) for length in lengths]

    def _prompt(self, tokens: list[int]) -> Prompt:
        if self.vocabulary is None:
            return Prompt(" ".join(_WORDS[index] for index in tokens))
        return Prompt(tokens)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Prompts of a file, whatever their lengths; each comes once before any comes again."""

    known: list[Prompt]

    @classmethod
    def read(cls, path: Path) -> "Dataset":
        """The prompts in a JSONL: each line has a `prompt` or `messages`, and may have more fields.

        These are vLLM's `--dataset-name custom` and SGLang's `openai`.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no prompts.
        """
        try:
            known = msgspec.json.Decoder(Prompt).decode_lines(path.read_bytes())
        except msgspec.DecodeError as error:
            raise ValueError(
                f'Every line of {path} must be {{"prompt": "..."}} or {{"messages": [{{"role": '
                f'"user", "content": "..."}}]}}: {error}.'
            ) from error
        if not known:
            raise ValueError(f"{path} holds no prompts: it is empty.")
        return cls(known)

    def draw(self, lengths: Sequence[int], seed: int, contents: str) -> list[Prompt]:
        """As many prompts as there are `lengths`, in random order."""
        rng = random.Random(f"{contents}, seed {seed}")
        rounds = (rng.sample(known, len(known)) for known in repeat(self.known))
        return list(islice(chain.from_iterable(rounds), len(lengths)))
