"""Structured output: what a client says that the answer must read like, as one grammar.

Whatever form it comes in (JSON schema, regex, choice, EBNF), the worker gets a grammar in
llguidance's notation (`params.Guide`); `grammars` compiles it first, so that what no worker could
follow is a 400 that names the field.
"""

from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from pagefleet.params import MAX_GRAMMAR_CHARACTERS
from pagefleet_gateway.errors import bad_request
from pagefleet_gateway.sandbox.grammar_job import Source
from pagefleet_gateway.sandbox.grammars import Grammars, Schema, Structure

MAX_CHOICES: Final = 4096
"""Texts that a choice may be among."""

_KINDS: Final = ("json", "regex", "choice", "grammar")
_OBJECT: Final[Schema] = {"type": "object"}
_LITERAL: Final = frozenset(" !',:;=@_")
"""Punctuation that means itself in a regex."""

Choice = Annotated[str, Meta(min_length=1)]
Text = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class JsonSchemaFormat(msgspec.Struct):
    """`response_format.json_schema`."""

    name: str
    schema: Schema | None = None
    """Any object, where there is none."""
    strict: bool | None = None
    """Every answer obeys its schema, strictly or not."""
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the OpenAI API calls structured output in completions."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def asked(self) -> "Asked | None":
        """See `Asked`.

        Raises:
            ApiError: 400; the schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Asked(_OBJECT, "response_format")
        if self.json_schema is None:
            raise bad_request("response_format.json_schema is missing.", "response_format")
        schema = _OBJECT if self.json_schema.schema is None else self.json_schema.schema
        return Asked(schema, "response_format.json_schema.schema")


class TextFormat(msgspec.Struct, omit_defaults=True):
    """What the Responses API calls structured output: `text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Schema | None = None
    strict: bool | None = None
    """Every answer obeys its schema, strictly or not."""
    description: str | None = None

    def asked(self) -> "Asked | None":
        """See `Asked`.

        Raises:
            ApiError: 400; the name or the schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Asked(_OBJECT, "text.format")
        if self.name is None or self.schema is None:
            raise bad_request("text.format needs a name and a schema.", "text")
        return Asked(self.schema, "text.format.schema")


class OutputFormat(msgspec.Struct):
    """What Anthropic's Messages API calls structured output: `output_config.format`."""

    type: Literal["json_schema"]
    schema: Schema

    def asked(self) -> "Asked":
        """See `Asked`."""
        return Asked(self.schema, "output_config.format.schema")


class Asked(NamedTuple):
    """The schema that a format asks for."""

    schema: Schema
    field: str
    """Where it stands in the body (dotted)."""


Form: TypeAlias = ResponseFormat | TextFormat | OutputFormat
"""What some route calls structured output."""


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """What vLLM calls structured output: exactly one of these."""

    json: Schema | str | None = None
    regex: Text | None = None
    choice: Annotated[list[Choice], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Text | None = None
    """EBNF (GBNF) or Lark."""


def structure_of(
    form: Form | None,
    outputs: StructuredOutputs | None,
    grammars: Grammars,
) -> Structure | None:
    """The grammar that these fields ask for, if they ask for one.

    Raises:
        ApiError: 400 that names the field.
    """
    asked = None if form is None else form.asked()
    if asked is not None and outputs is not None:
        field = asked.field.partition(".")[0]
        raise bad_request(
            f"{field} and structured_outputs exclude each other.", "structured_outputs"
        )
    if outputs is not None:
        return _of_outputs(outputs, grammars)
    return None if asked is None else grammars.json(asked.schema, asked.field)


def _of_outputs(outputs: StructuredOutputs, grammars: Grammars) -> Structure:
    given = [name for name in _KINDS if getattr(outputs, name) is not None]
    if len(given) != 1:
        raise bad_request(
            f"structured_outputs needs exactly one of {', '.join(_KINDS)}.", "structured_outputs"
        )
    field = f"structured_outputs.{given[0]}"
    if outputs.json is not None:
        return grammars.json(outputs.json, field)
    if outputs.regex is not None:
        return grammars.structure(Source("regex", outputs.regex), field)
    if outputs.choice is not None:
        texts = "|".join(map(_literally, outputs.choice))
        return grammars.structure(Source("regex", texts), field)
    return grammars.structure(Source("grammar", outputs.grammar or ""), field)


def _literally(text: str) -> str:
    """A regex of this one text."""
    return "".join(c if c.isalnum() or c in _LITERAL else f"\\x{{{ord(c):x}}}" for c in text)
