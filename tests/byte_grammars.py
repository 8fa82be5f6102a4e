"""Grammars over a vocabulary in which a token is the byte of its number."""

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from pagefleet_worker.grammar import Grammars


class Bytes:
    """A tokenizer in the form that llguidance wraps."""

    bos_token_id = None

    def __init__(self, size: int, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.special_token_ids = list(ends)
        self.tokens = [bytes([token]) if token < 256 else b"" for token in range(size)]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def byte_grammars(size: int, ends: Sequence[int]) -> Grammars:
    """Over tokens 0 to `size` - 1, of which `ends` end a sequence."""

    def build() -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(Bytes(size, ends)), n_vocab=size, eos_token=list(ends))

    return Grammars(build, ends)
