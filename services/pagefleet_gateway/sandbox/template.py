"""A model's own chat template, rendered in jinja2's sandbox with what transformers gives it.

A template is a program that comes with a model: gateways render it in a helper process
(`isolated_template`).

The names that templates expect (`raise_exception`, `strftime_now`, `tojson` without HTML escapes,
the `generation` block, loop controls, trimmed blocks) are transformers' documented conventions
("Chat templates: advanced usage").
"""

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagefleet.manifest import CHAT_TEMPLATE_FILE, Manifest

_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplateError(ValueError):
    """A template that is malformed, or that refuses a conversation."""


class TemplateSource(msgspec.Struct, frozen=True, array_like=True):
    """A template, and the special tokens (name -> text) that are among its variables."""

    text: str
    special_tokens: dict[str, str]

    @classmethod
    def load(cls, folder: Path, replacement: Path | None = None) -> "TemplateSource | None":
        """That of a prepared folder, or the file in its place; None for a model that has none.

        Raises:
            ChatTemplateError: the replacement cannot be read, or is not UTF-8.
        """
        path = replacement or folder / CHAT_TEMPLATE_FILE
        if replacement is None and not path.exists():
            return None
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ChatTemplateError(f"{path} is no text in UTF-8: {error}.") from error
        except OSError as error:
            text = f"The template {path} (--chat-template) cannot be read: {error.strerror}."
            raise ChatTemplateError(text) from error
        manifest = Manifest.load(folder)
        named = {"bos_token": manifest.bos_token, "eos_token": manifest.eos_token}
        return cls(text, {name: token for name, token in named.items() if token is not None})


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """What a helper makes of a conversation."""

    text: str
    refusal: str | None = None


def begin(content: bytes) -> Callable[[bytes], bytes]:
    """A helper's work (`helper`): jobs are conversations as JSON, which knows integers of any
    size; results are `Rendered`.

    Raises:
        ChatTemplateError: the `TemplateSource` is malformed.
    """
    source = msgspec.msgpack.decode(content, type=TemplateSource)
    template = ChatTemplate(source.text, source.special_tokens)

    def work(job: bytes) -> bytes:
        try:
            rendered = Rendered(template.render(msgspec.json.decode(job)))
        except ChatTemplateError as error:
            rendered = Rendered("", str(error))
        return msgspec.msgpack.encode(rendered)

    return work


class ChatTemplate:
    """`source` compiled; `special_tokens` (name -> text) are among its variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"The chat template is malformed in line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise ChatTemplateError("The chat template is nested too deeply.") from error
        self._special_tokens = dict(special_tokens)

    def render(self, conversation: Mapping[str, Any]) -> str:
        """The prompt of a conversation: `messages`, `tools`, `add_generation_prompt` and the like.

        `strftime_now` among them is the Unix time that the function of this name tells; without it
        that is the present. Raises ChatTemplateError with the template's own words where it refuses
        the conversation.
        """
        variables = {"tools": None, "documents": None, **self._special_tokens, **conversation}
        now = datetime.fromtimestamp(conversation.get("strftime_now", time.time()))
        variables["strftime_now"] = now.strftime
        try:
            return self._template.render(variables)
        except _FAILURES as error:
            raise ChatTemplateError(f"The chat template refused the messages: {error}") from error


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
