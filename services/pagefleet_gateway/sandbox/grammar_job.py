"""What a gateway and its grammar helpers say to each other."""

from typing import Literal

import msgspec

Form = Literal["json_schema", "regex", "grammar", "llguidance"]
"""A JSON schema; a regex; EBNF (GBNF) or Lark; what is in a worker's notation already."""


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A grammar as it comes."""

    form: Form
    text: str


class Compiled(msgspec.Struct, frozen=True, array_like=True):
    """What became of it."""

    grammar: str
    """In a worker's notation (`pagefleet.params.Guide`)."""
    refusal: str | None = None
    """Why no worker could follow it, as the end of a sentence."""
