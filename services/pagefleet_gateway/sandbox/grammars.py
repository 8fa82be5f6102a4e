"""Grammars that answers must obey, compiled in helper processes and remembered by their bytes.

A grammar that no worker could follow (`grammar`), or whose compilation takes too much, is a 400
that names the field it came from.

JSON may have a line break and some spaces where JSON allows space, and no more: else a weak model
could write nothing but spaces until its tokens are used up.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import msgspec

from pagefleet.params import MAX_GRAMMAR_CHARACTERS, Guide
from pagefleet_gateway.errors import ApiError, bad_request
from pagefleet_gateway.sandbox.grammar_job import Compiled, Source
from pagefleet_gateway.sandbox.helper import Limits
from pagefleet_gateway.sandbox.helpers import HelperPool, LimitError

LIMITS: Final = Limits(cpu_seconds=3.0, seconds=15.0, memory=512 << 20)
"""To compile one grammar."""

MAX_REMEMBERED: Final = 128

_HELPERS: Final = 2
_JSON_SPACE: Final = r"\n?[ \t]{0,40}"

Schema: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Structure:
    """A grammar, and the field of the body that it comes from."""

    grammar: str
    field: str
    free: bool = False
    """It leaves room for text around what it guarantees."""

    def guide(self, ignore_eos: bool) -> Guide:
        """What the worker is told."""
        return Guide(self.grammar, to_end=ignore_eos)


class Grammars:
    """Compiles what clients ask for."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._helpers = HelperPool("grammar", b"", limits, _HELPERS)
        self._compiled = lru_cache(MAX_REMEMBERED)(self._compile)

    def __repr__(self) -> str:
        return f"<Grammars: {self._compiled.cache_info().currsize} remembered>"

    def structure(self, source: Source, field: str) -> Structure:
        """A grammar that comes from the field `field` (dotted).

        Raises:
            ApiError: 400 that names the field; 503, too many are being compiled.
        """
        if len(source.text) > MAX_GRAMMAR_CHARACTERS:
            raise refused(field, f"it has more than {MAX_GRAMMAR_CHARACTERS} characters")
        try:
            compiled = self._compiled(source)
        except LimitError as error:
            raise refused(field, str(error)) from error
        if compiled.refusal is not None:
            raise refused(field, compiled.refusal)
        return Structure(compiled.grammar, field.partition(".")[0])

    def json(self, schema: Schema | str, field: str) -> Structure:
        """JSON under a schema, which comes from the field `field` (dotted).

        Raises:
            ApiError: as `structure` does.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise refused(field, f"it is no JSON: {error}") from error
        if not isinstance(schema, dict):
            raise refused(field, "a schema is a JSON object")
        return self.structure(Source("json_schema", json.dumps(spaced(schema))), field)

    def _compile(self, source: Source) -> Compiled:
        result = self._helpers.run(msgspec.msgpack.encode(source))
        return msgspec.msgpack.decode(result, type=Compiled)


def spaced(schema: Schema) -> Schema:
    """The schema, with a bound on white space that llguidance understands."""
    return {**schema, "x-guidance": {"whitespace_pattern": _JSON_SPACE}}


def refused(field: str, reason: str) -> ApiError:
    """A 400 that names the field's first part, which is its name in the body."""
    return bad_request(f"{field} is not usable: {reason}.", field.partition(".")[0])
