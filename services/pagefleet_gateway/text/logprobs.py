"""Logprobs of tokens, and the three forms in which clients see them.

The completion form (OpenAI's legacy API) has parallel lists, with the alternatives as a mapping
from token text; the chat form has an object for each token, with its bytes; vLLM's
`prompt_logprobs` maps token ids. A token whose bytes are no UTF-8 text of their own is written as
OpenAI does: `bytes:\\xe2\\x80`. Until they are written, alternatives stay as packed as they came:
15 bytes each with all that is around them, where pairs in lists took 124.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from pagefleet.wire import Logprobs, unpack_floats, unpack_ints
from pagefleet_gateway.text.vocabulary import Vocabulary

LOWEST: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of an answer, or of an echoed prompt."""

    token: int
    offset: int
    """Where its text begins, in characters of the answer's text."""
    logprob: float | None = None
    """None for a prompt's first token, or where none were asked for."""
    packed: bytes = b""
    """Ids of the alternatives as `Ints`, then their logprobs as `Floats`."""

    @property
    def top(self) -> list[tuple[int, float]]:
        """Alternatives, most likely first."""
        middle = len(self.packed) // 2
        ids, logprobs = unpack_ints(self.packed[:middle]), unpack_floats(self.packed[middle:])
        return [(token, max(value, LOWEST)) for token, value in zip(ids, logprobs, strict=True)]


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a choice of `/v1/completions`; lists over the tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Alternative(msgspec.Struct):
    """A token in the chat form."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative):
    """A generated token in the chat form."""

    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct):
    """`logprobs` of a choice of `/v1/chat/completions`."""

    content: list[ChatToken]
    refusal: None = None


class PromptAlternative(msgspec.Struct):
    """A token in vLLM's form."""

    logprob: float
    rank: int | None
    """From 1; None beyond the alternatives asked for."""
    decoded_token: str


PromptForm = list[dict[str, PromptAlternative] | None]


def each_of(logprobs: Logprobs) -> list[tuple[float | None, bytes]]:
    """Of each token its own logprob and its alternatives (`TokenEntry.packed`)."""
    chosen = unpack_floats(logprobs.chosen)
    width = len(logprobs.top) // max(len(chosen), 1)
    starts = (width * row for row in range(len(chosen)))
    return [
        (max(logprob, LOWEST), logprobs.top_ids[at : at + width] + logprobs.top[at : at + width])
        for logprob, at in zip(chosen, starts, strict=True)
    ]


def token_text(vocabulary: Vocabulary, token: int, by_id: bool = False) -> str:
    """The token alone, in words, or by its id, which is no other's."""
    if by_id:
        return f"token_id:{token}"
    content = vocabulary.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def completion_form(
    entries: Sequence[TokenEntry], vocabulary: Vocabulary, by_id: bool = False
) -> CompletionLogprobs:
    """As `/v1/completions` shows them: the chosen token is always among the alternatives."""
    form = CompletionLogprobs([], [], [], [])
    for entry in entries:
        text = token_text(vocabulary, entry.token, by_id)
        form.tokens.append(text)
        form.token_logprobs.append(entry.logprob)
        form.text_offset.append(entry.offset)
        if entry.logprob is None:
            form.top_logprobs.append(None)
            continue
        top: dict[str, float] = {}
        for token, logprob in entry.top:
            top.setdefault(token_text(vocabulary, token, by_id), logprob)
        top.setdefault(text, entry.logprob)
        form.top_logprobs.append(top)
    return form


def chat_form(
    entries: Sequence[TokenEntry], vocabulary: Vocabulary, by_id: bool = False
) -> ChatLogprobs:
    """As `/v1/chat/completions` shows them."""

    def alternative(token: int, logprob: float) -> Alternative:
        content = vocabulary.token_bytes(token)
        return Alternative(token_text(vocabulary, token, by_id), logprob, list(content))

    content = []
    for entry in entries:
        chosen = alternative(entry.token, LOWEST if entry.logprob is None else entry.logprob)
        top = [alternative(token, logprob) for token, logprob in entry.top]
        content.append(ChatToken(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def prompt_form(entries: Sequence[TokenEntry], vocabulary: Vocabulary) -> PromptForm:
    """As vLLM's `prompt_logprobs` shows them."""
    form: PromptForm = []
    for entry in entries:
        if entry.logprob is None:
            form.append(None)
            continue
        shown = {
            str(token): PromptAlternative(logprob, rank, token_text(vocabulary, token))
            for rank, (token, logprob) in enumerate(entry.top, 1)
        }
        shown.setdefault(
            str(entry.token),
            PromptAlternative(entry.logprob, None, token_text(vocabulary, entry.token)),
        )
        form.append(shown)
    return form
