"""What each token id of a vocabulary stands for, in bytes.

Two kinds of vocabulary are known. In a byte-level one (GPT-2, Llama 3, Qwen) every token is a
string of bytes, and text is their concatenation, decoded with replacement of what is not UTF-8. In
one of text pieces (SentencePiece: Llama 2, Mistral, Gemma) a token is text, whose meaning depends
only on whether anything comes before it (a leading space is dropped at the start); where it has
byte fallback, tokens <0x00> to <0xFF> are bytes, and a run of them is their text, or one U+FFFD for
each where the whole run is not UTF-8 (the ByteFallback decoder of `tokenizers`).
"""

import json
import re
from collections.abc import Iterable, Sequence

import tokenizers

from pagefleet.byte_alphabet import BYTE_OF_CHARACTER

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_PIECE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class VocabularyError(ValueError):
    """A tokenizer whose decoder is of neither known kind."""


class Vocabulary:
    """The tokens of `tokenizer`.

    special_ids: what decoding leaves out when asked to skip special tokens. byte_level: which of
    the two kinds this is. byte_values: id -> byte of the fallback tokens. longest_token: no token
    stands for more characters of text than this.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        steps = _decoder_steps(tokenizer)
        self.byte_level = steps == ["ByteLevel"]
        if not self.byte_level and not set(steps) <= _PIECE_DECODERS:
            raise VocabularyError(
                f"The tokenizer's decoder ({', '.join(steps)}) is not supported: text can be "
                f"streamed for ByteLevel alone or for {', '.join(sorted(_PIECE_DECODERS))}."
            )
        tokens = tokenizer.get_vocab(with_added_tokens=True)
        self.byte_values: dict[int, int] = {}
        if "ByteFallback" in steps:
            matches = {i: _BYTE_TOKEN.fullmatch(token) for token, i in tokens.items()}
            self.byte_values = {i: int(m[1], 16) for i, m in matches.items() if m is not None}
        self._bytes: dict[int, bytes] = {}
        self._anchor, self._anchor_text = self._find_anchor(tokens.values())
        self.longest_token = max(map(len, tokens))

    @property
    def size(self) -> int:
        """The number of tokens, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __contains__(self, token_id: int) -> bool:
        return bool(self._bytes.get(token_id)) or self._tokenizer.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds in the middle of a text; b"" for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            try:
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                return token.encode()
        if token_id in self.byte_values:
            return bytes([self.byte_values[token_id]])
        return self.continuation([token_id]).encode()

    def continuation(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` after other text; special tokens are not skipped."""
        text = self._tokenizer.decode([self._anchor, *token_ids], skip_special_tokens=False)
        return text[len(self._anchor_text) :]

    def beginning(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` at the start of a text; special tokens are not skipped."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _find_anchor(self, ids: Iterable[int]) -> tuple[int, str]:
        """A token to stand before others, so that they are decoded as within a text."""
        for token_id in sorted(set(ids) - self.byte_values.keys()):
            if text := self.beginning([token_id]):
                return token_id, text
        raise VocabularyError("The tokenizer has no token with a text of its own.")


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[str]:
    if tokenizer.decoder is None:
        return ["none"]
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps]
