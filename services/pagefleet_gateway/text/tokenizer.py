"""The tokenizer of a prepared model: text to ids and back, without transformers.

A completion's prompt is encoded as transformers' AutoTokenizer does: special tokens in the text are
recognised and the post-processor adds its own (a beginning-of-sequence token). Chat prompts are
encoded by `chat_prompt`.

Encoding and decoding let the interpreter go (`encode_batch_fast`, `decode_batch`; the backend's
`decode` does not); call them in a thread.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import tokenizers
from tokenizers.models import BPE, Unigram

from pagefleet.manifest import TOKENIZER_FILE, Manifest
from pagefleet_gateway.text.vocabulary import Vocabulary

# The most characters that a normalizer in use (NFC, NFKC) makes one of.
_COMPOSED_CHARACTERS = 4

REMEMBERED_WORDS = 2_000
"""Whose tokens each thread that encodes keeps. The library's own bound is 10,000, which are 3 MB of
a language's words, and 80 MB of the longest.
"""


class PromptError(ValueError):
    """A prompt that cannot be encoded; the message is for the client."""


class PromptTooLongError(PromptError):
    """A prompt that must exceed the model's length, however it is cut into tokens."""


def remember_less(backend: tokenizers.Tokenizer) -> None:
    """Let it keep the tokens of `REMEMBERED_WORDS` only."""
    if isinstance(backend.model, BPE | Unigram):
        backend.model._resize_cache(REMEMBERED_WORDS)


class Tokenizer:
    """Encodes and decodes for one model, whose longest sequence is `max_model_len` tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, max_model_len: int) -> None:
        backend.no_padding()
        backend.no_truncation()
        remember_less(backend)
        self.backend = backend
        self.vocabulary = Vocabulary(backend)
        self.max_model_len = max_model_len
        composed = 1 if backend.normalizer is None else _COMPOSED_CHARACTERS
        self._max_characters = max_model_len * self.vocabulary.longest_token * composed

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """The tokenizer in the prepared folder."""
        backend = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        return cls(backend, Manifest.load(folder).max_model_len)

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text, or a PromptError.

        add_special_tokens: let the post-processor add its own; those in the text always count.
        """
        for text in texts:
            self.check(text)
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids that the vocabulary lacks have none."""
        (text,) = self.decode_all([token_ids], skip_special_tokens)
        return text

    def decode_all(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """The text of each of several."""
        return self.backend.decode_batch(sequences, skip_special_tokens=skip_special_tokens)

    @cached_property
    def ending(self) -> list[int]:
        """The ids that the post-processor puts behind every text."""
        encoding = self.backend.encode("a")
        added = sum(1 for _ in takewhile(bool, reversed(encoding.special_tokens_mask)))
        return encoding.ids[len(encoding.ids) - added :]

    def check(self, text: str) -> None:
        """Refuse, with a PromptError, text that has no encoding or must be too long.

        This takes far less time than encoding it.
        """
        if len(text) > self._max_characters:
            raise PromptTooLongError(
                f"This model's maximum context length is {self.max_model_len} tokens, and the "
                f"prompt's {len(text)} characters are more, however they are cut."
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"The prompt holds half a surrogate pair (U+{ord(text[error.start]):04X}) at "
                f"character {error.start}, which is not text."
            ) from None
