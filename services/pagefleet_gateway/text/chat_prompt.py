"""A conversation's prompt ids, in which only the template's own special tokens count.

A special token that somebody types into a message must be text: else a message could end its turn
and speak as the system. So, before the template sees it, every special token within a string of the
conversation is hidden as one private-use character, and a string that ends or begins with a part of
one is fenced off, lest it become whole beside its neighbour. The special tokens in the rendered
text are then the template's. Each is put into a frame that only the twin tokenizer of this module
knows; what was hidden is revealed; and the twin, to which special tokens are text, encodes it all
at once. Where no special token was typed, the ids are those of the rendered text.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken

from pagefleet_gateway.sandbox.isolated_template import IsolatedTemplate
from pagefleet_gateway.sandbox.template import TemplateSource
from pagefleet_gateway.text.tokenizer import PromptError, Tokenizer, remember_less

# Noncharacters, which Unicode reserves for use inside a program (chapter 23.7).
_FRAME = "\ufdd0"
_FENCE = "\ufdd1"
_END = "\ufdd2"
_PLANE_16 = range(0x10FFFD, 0x0FFFFF, -1)


class Template(Protocol):
    """Renders conversations."""

    def render(self, conversation: Mapping[str, Any]) -> str:
        """See `template.ChatTemplate`."""
        ...


class ChatPrompts:
    """Encodes conversations with one model's tokenizer and template."""

    def __init__(self, tokenizer: Tokenizer, template: Template, source: str = "") -> None:
        self.source = source
        """The template's own text."""
        self._tokenizer = tokenizer
        self._template = template
        self._specials = _SpecialTokens(tokenizer.backend.get_added_tokens_decoder())
        self._twin, self._id_of_frame = _twin(tokenizer.backend, self._specials)

    @classmethod
    def load(
        cls, folder: Path, tokenizer: Tokenizer, template: Path | None = None
    ) -> "ChatPrompts | None":
        """Those of the prepared folder, or by `template`; None for a model without a template.

        Raises:
            ChatTemplateError: the template is not usable.
        """
        source = TemplateSource.load(folder, template)
        if source is None:
            return None
        return cls(tokenizer, IsolatedTemplate(source), source.text)

    def encode(
        self, conversation: Mapping[str, Any], continue_final_message: bool = False
    ) -> list[int]:
        """The ids of `conversation`, rendered (see `ChatTemplate.render`).

        continue_final_message: leave out what the template writes after the last message, whose
        content is a string. Raises PromptError for text that cannot be encoded and
        ChatTemplateError for messages that the template refuses.
        """
        hidden = _Hidden(self._specials, conversation)
        if continue_final_message:
            rendered = self._render_open_ended(hidden.conversation)
        else:
            rendered = self._template.render(hidden.conversation)
        self._tokenizer.check(rendered)
        text = hidden.reveal(self._specials.replace(rendered, self._frame))
        (encoding,) = self._twin.encode_batch_fast([text], add_special_tokens=False)
        if forged := self._specials.ids.intersection(encoding.ids):
            token = self._tokenizer.backend.id_to_token(min(forged))
            raise PromptError(f"The tokenizer of this model cannot tell {token!r} from its text.")
        return [self._id_of_frame.get(i, i) for i in encoding.ids]

    def _render_open_ended(self, conversation: Mapping[str, Any]) -> str:
        """The rendering up to the end of the last message; its final space stays if it is kept."""
        *messages, last = conversation["messages"]
        text = last["content"].rstrip()
        space = last["content"][len(text) :]
        marked = {**last, "content": text + _END + space}
        rendered = self._template.render({**conversation, "messages": [*messages, marked]})
        before, end, after = rendered.rpartition(_END)
        if not end:
            raise PromptError("The chat template leaves out the last message: nothing to continue.")
        return before + space if after.startswith(space) else before

    def _frame(self, token: str) -> str:
        return _frame(self._specials.tokens[token][0])


def _frame(token_id: int) -> str:
    return f"{_FRAME}{token_id}{_FRAME}"


def _twin(
    backend: tokenizers.Tokenizer, specials: "_SpecialTokens"
) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """A copy of `backend` to which special tokens are text and frames are tokens.

    Also the special token that the id of each frame stands for.
    """
    twin = tokenizers.Tokenizer.from_str(backend.to_str())
    twin.encode_special_tokens = True
    remember_less(twin)
    first_frame = twin.get_vocab_size(with_added_tokens=True)
    twin.add_tokens(
        [
            AddedToken(
                _frame(token_id),
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=False,
            )
            for token_id, token in specials.tokens.values()
        ]
    )
    ids = [token_id for token_id, _ in specials.tokens.values()]
    return twin, dict(enumerate(ids, first_frame))


class _SpecialTokens:
    """Finds special tokens in text, as `tokenizers` does: the leftmost, then the longest."""

    def __init__(self, added_tokens: Mapping[int, AddedToken]) -> None:
        self.tokens = {t.content: (i, t) for i, t in added_tokens.items() if t.special}
        self.ids = frozenset(token_id for token_id, _ in self.tokens.values())
        longest_first = sorted(added_tokens.values(), key=lambda t: -len(t.content))
        alternatives = [
            rf"(?<!\w){re.escape(t.content)}(?!\w)" if t.single_word else re.escape(t.content)
            for t in longest_first
        ]
        self._any_added = re.compile("|".join(alternatives) or "(?!)")
        self._heads = {token[:cut] for token in self.tokens for cut in range(1, len(token))}
        self._tails = {token[cut:] for token in self.tokens for cut in range(1, len(token))}
        self._first_of_tails = {tail[0] for tail in self._tails}
        self._last_of_heads = {head[-1] for head in self._heads}
        self._longest_part = max(map(len, self._heads), default=0)

    def replace(self, text: str, replacement: Callable[[str], str]) -> str:
        def replace_special(match: re.Match[str]) -> str:
            return replacement(match[0]) if match[0] in self.tokens else match[0]

        return self._any_added.sub(replace_special, text)

    def fence(self, text: str) -> str:
        """`text` with a fence at an end that could be part of a special token."""
        parts = range(1, self._longest_part + 1)
        if text[:1] in self._first_of_tails and any(text[:n] in self._tails for n in parts):
            text = _FENCE + text
        if text[-1:] in self._last_of_heads and any(text[-n:] in self._heads for n in parts):
            text += _FENCE
        return text


class _Hidden:
    """A conversation without special tokens in its strings, and what it takes to restore them."""

    def __init__(self, specials: _SpecialTokens, conversation: Mapping[str, Any]) -> None:
        text = "".join(_strings(conversation))
        if not {_FRAME, _FENCE, _END}.isdisjoint(text):
            raise PromptError(
                "The messages hold U+FDD0, U+FDD1 or U+FDD2, which are no characters."
            )
        used = set(text)
        self._unused = (chr(code) for code in _PLANE_16 if chr(code) not in used)
        self._specials = specials
        self._stand_ins: dict[str, str] = {}
        self._strings: dict[str, str] = {}
        """Those that were hidden: the same keys and roles come again and again."""
        self.conversation: Mapping[str, Any] = self._hide(conversation)

    def reveal(self, text: str) -> str:
        table = {ord(stand_in): token for token, stand_in in self._stand_ins.items()}
        return text.translate({**table, ord(_FENCE): ""})

    def _hide(self, value: Any) -> Any:
        if isinstance(value, str):
            if value not in self._strings:
                replaced = self._specials.replace(value, self._stand_in)
                self._strings[value] = self._specials.fence(replaced)
            return self._strings[value]
        if isinstance(value, Mapping):
            return {self._hide(key): self._hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(item) for item in value]
        return value

    def _stand_in(self, token: str) -> str:
        if token not in self._stand_ins:
            self._stand_ins[token] = next(self._unused)
        return self._stand_ins[token]


def _strings(value: Any) -> Iterator[str]:
    """All strings in it, in any order."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
