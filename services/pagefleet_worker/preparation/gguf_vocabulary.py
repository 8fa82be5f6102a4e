"""What a GGUF file's metadata says of its tokenizer (ggml, docs/gguf.md): tokens, and what they are
for."""

from enum import IntEnum
from typing import Any

import msgspec

from pagefleet_worker.model_files import ModelError

INSTEAD = "Name the model's tokenizer.json, or a folder that holds it, with --tokenizer."
"""What to do where a file's own tokenizer cannot be read."""

_PREFIX = "tokenizer.ggml."

_ENDS_OF_TURNS = ("<|im_end|>", "<|end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>")
"""Tokens that end a turn, by what they are: many files name none (llama.cpp knows them so too)."""

_HARMONY = ("<|return|>", "<|call|>")
"""Those of gpt-oss, whose turns have several messages: `<|end|>` ends one."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type` (the GGUF specification, after SentencePiece's types)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GgufVocabulary(msgspec.Struct, frozen=True, rename=lambda name: _PREFIX + name):
    """The keys `tokenizer.ggml.*`; what a file leaves open depends on its `model`."""

    model: str | None = None
    pre: str | None = None
    tokens: list[str] = []
    token_type: list[int] = []
    scores: list[float] = []
    merges: list[str] = []
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eot_token_id: int | None = None
    eom_token_id: int | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_space_prefix: bool | None = None
    remove_extra_whitespaces: bool = False
    precompiled_charsmap: list[int] = []

    @property
    def roles(self) -> dict[str, int]:
        """The ids of the tokens that begin and end texts and turns, as far as they are named."""
        ids = {
            "bos": self.bos_token_id,
            "eos": self.eos_token_id,
            "eot": self.eot_token_id,
            "eom": self.eom_token_id,
        }
        return {role: token_id for role, token_id in ids.items() if token_id is not None}

    @property
    def ends_of_turns(self) -> tuple[int, ...]:
        """The ids of the tokens that end a turn of a chat, named or known."""
        named = [self.roles[role] for role in ("eot", "eom") if role in self.roles]
        numbers = self.numbers
        ends = _HARMONY if numbers.keys() >= set(_HARMONY) else _ENDS_OF_TURNS
        known = [numbers[token] for token in ends if token in numbers]
        return tuple(dict.fromkeys([*named, *known]))

    @property
    def numbers(self) -> dict[str, int]:
        """The ids of the tokens."""
        return {token: number for number, token in enumerate(self.tokens)}


def gguf_vocabulary(metadata: dict[str, Any]) -> GgufVocabulary:
    """Read those keys.

    Raises:
        ModelError: they are malformed.
    """
    try:
        vocabulary = msgspec.convert(metadata, GgufVocabulary)
    except msgspec.ValidationError as error:
        raise ModelError(
            f"The GGUF metadata is malformed: {error}. Convert the model again."
        ) from error
    count = len(vocabulary.tokens)
    for role, token_id in vocabulary.roles.items():
        if not 0 <= token_id < count:
            raise ModelError(
                f"The GGUF metadata has {count} tokens, and token {token_id} as {role}_token_id. "
                "Convert the model again."
            )
    for field in ("token_type", "scores"):
        if (found := len(getattr(vocabulary, field))) not in (0, count):
            raise ModelError(
                f"The GGUF metadata has {count} tokens and {_PREFIX}{field} for {found}. Convert "
                "the model again."
            )
    return vocabulary
