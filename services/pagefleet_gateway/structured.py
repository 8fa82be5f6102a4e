"""Structured output: what a client says that the answer must read like, as one grammar.

Whatever form it comes in (JSON schema, regex, choice, EBNF), the worker gets a grammar in
llguidance's notation (`params.Guide`). It is compiled here first, with the worker's library and
limits but over a vocabulary of bytes, so that what no worker could follow is a 400 that names the
field: what is malformed, what is not supported, what no text can satisfy, what is too large to
begin. (What becomes too large later ends its request, in the worker.)

JSON may have a line break and some spaces where JSON allows space, and no more: else a weak model
could write nothing but spaces until its tokens are used up.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from pagefleet.params import MAX_GRAMMAR_CHARACTERS, MAX_GRAMMAR_ITEMS, Guide
from pagefleet_gateway.errors import ApiError, bad_request

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CHOICES: Final = 4096
"""Texts that a choice may be among."""

_JSON_SPACE: Final = r"\n?[ \t]{0,40}"
_KINDS: Final = ("json", "regex", "choice", "grammar")
_LITERAL: Final = frozenset(" !',:;=@_")
"""Punctuation that means itself in a regex."""

_MAX_REASON: Final = 300

Schema = dict[str, Any]
Choice = Annotated[str, Meta(min_length=1)]
Text = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class JsonSchemaFormat(msgspec.Struct):
    """`response_format.json_schema`."""

    name: str
    schema: Schema = msgspec.field(default_factory=lambda: {"type": "object"})
    strict: bool | None = None
    """Every answer obeys its schema, strictly or not."""
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the OpenAI API calls structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """What vLLM calls structured output: exactly one of these."""

    json: Schema | str | None = None
    regex: Text | None = None
    choice: Annotated[list[Choice], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Text | None = None
    """EBNF (GBNF) or Lark."""


@dataclass(frozen=True)
class Structure:
    """A grammar, and the field of the body that it comes from."""

    grammar: str
    field: str

    def guide(self, ignore_eos: bool) -> Guide:
        """What the worker is told."""
        return Guide(self.grammar, to_end=ignore_eos)


def structure_of(
    response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> Structure | None:
    """The grammar that these fields ask for, if they ask for one.

    Raises:
        ApiError: 400 that names the field.
    """
    formatted = response_format is not None and response_format.type != "text"
    if formatted and outputs is not None:
        raise bad_request(
            "response_format and structured_outputs exclude each other.", "structured_outputs"
        )
    if outputs is not None:
        return _of_outputs(outputs)
    return _of_format(response_format) if response_format is not None else None


def json_structure(schema: Schema | str, field: str) -> Structure:
    """JSON under a schema, which comes from the field `field` (dotted).

    Raises:
        ApiError: 400 that names the field.
    """
    from llguidance import LLMatcher

    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _refused(field, f"it is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _refused(field, "a schema is a JSON object")
    return checked(LLMatcher.grammar_from_json_schema(json.dumps(spaced(schema))), field)


def spaced(schema: Schema) -> Schema:
    """The schema, with a bound on white space that llguidance understands."""
    return {**schema, "x-guidance": {"whitespace_pattern": _JSON_SPACE}}


def checked(grammar: str, field: str) -> Structure:
    """A grammar that workers can follow.

    Raises:
        ApiError: 400 that names the field, whose first part is its name in the body.
    """
    from llguidance import LLMatcher, LLParserLimits

    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise _refused(field, f"it has more than {MAX_GRAMMAR_CHARACTERS} characters")
    limits = LLParserLimits(step_max_items=MAX_GRAMMAR_ITEMS)
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    matcher.try_consume_tokens(matcher.compute_ff_tokens())
    matcher.compute_bitmask()
    if matcher.is_error():
        raise _refused(field, _reason(matcher.get_error()))
    return Structure(grammar, field.partition(".")[0])


def _of_format(form: ResponseFormat) -> Structure | None:
    match form:
        case ResponseFormat("text"):
            return None
        case ResponseFormat("json_object"):
            return json_structure({"type": "object"}, "response_format")
        case ResponseFormat("json_schema", JsonSchemaFormat() as described):
            return json_structure(described.schema, "response_format.json_schema.schema")
    raise bad_request("response_format.json_schema is missing.", "response_format")


def _of_outputs(outputs: StructuredOutputs) -> Structure:
    from llguidance import grammar_from

    given = [name for name in _KINDS if getattr(outputs, name) is not None]
    if len(given) != 1:
        raise bad_request(
            f"structured_outputs needs exactly one of {', '.join(_KINDS)}.", "structured_outputs"
        )
    field = f"structured_outputs.{given[0]}"
    if outputs.json is not None:
        return json_structure(outputs.json, field)
    if outputs.regex is not None:
        return checked(grammar_from("regex", outputs.regex), field)
    if outputs.choice is not None:
        texts = "|".join(map(_literally, outputs.choice))
        return checked(grammar_from("regex", texts), field)
    try:
        return checked(grammar_from("grammar", outputs.grammar or ""), field)
    except ValueError as error:
        raise _refused(field, str(error)) from error


def _literally(text: str) -> str:
    """A regex of this one text."""
    return "".join(c if c.isalnum() or c in _LITERAL else f"\\x{{{ord(c):x}}}" for c in text)


class _Bytes:
    """A tokenizer in the form that llguidance wraps: a token for each byte, and an end."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _byte_tokenizer() -> "LLTokenizer":
    from llguidance import LLTokenizer, TokenizerWrapper

    end = _Bytes.eos_token_id
    return LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=end + 1, eos_token=[end])


def _reason(text: str) -> str:
    """The library's words without its dumps, on one line."""
    head = text.partition("\n<state>")[0]
    if head.startswith("panic"):
        return "it asks for what a grammar over text cannot say"
    if head.startswith("NoExtension"):
        return "no text satisfies it"
    return " ".join(head.split())[:_MAX_REASON]


def _refused(field: str, reason: str) -> ApiError:
    return bad_request(f"{field} is not usable: {reason}.", field.partition(".")[0])
