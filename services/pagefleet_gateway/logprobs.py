"""Logprobs of tokens, and the three forms in which clients see them.

The completion form (OpenAI's legacy API) has parallel lists, with the alternatives as a mapping
from token text; the chat form has an object for each token, with its bytes; vLLM's
`prompt_logprobs` maps token ids. A token whose bytes are no UTF-8 text of their own is written as
OpenAI does: `bytes:\\xe2\\x80`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from pagefleet.wire import Logprobs, unpack_floats, unpack_ints
from pagefleet_gateway.vocabulary import Vocabulary

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
    top: list[tuple[int, float]] = field(default_factory=list)
    """Alternatives, most likely first."""


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


def unpacked(logprobs: Logprobs) -> list[tuple[float | None, list[tuple[int, float]]]]:
    """Of each token its own logprob and its alternatives."""
    chosen = unpack_floats(logprobs.chosen)
    ids, top = unpack_ints(logprobs.top_ids), unpack_floats(logprobs.top)
    width = len(ids) // max(len(chosen), 1)
    return [
        (
            max(logprob, LOWEST),
            [(ids[k], max(top[k], LOWEST)) for k in range(row * width, (row + 1) * width)],
        )
        for row, logprob in enumerate(chosen)
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
