"""The notations by their names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pagefleet_gateway.tool_parsers.hermes import hermes
from pagefleet_gateway.tool_parsers.llama3_json import llama3_json
from pagefleet_gateway.tool_parsers.mistral import mistral
from pagefleet_gateway.tool_parsers.parser import Script, ToolParser
from pagefleet_gateway.tool_parsers.pythonic import pythonic


@dataclass(frozen=True)
class Notation:
    """How models of a family write calls."""

    script: Callable[[ToolParser], Script]
    tagged: bool = False
    """Calls are objects between the tags of `hermes`."""
    special: bool = False
    """Its markers are special tokens, which must be part of the text."""


NOTATIONS: Final[dict[str, Notation]] = {
    "hermes": Notation(hermes, tagged=True),
    "qwen": Notation(hermes, tagged=True),
    "llama3_json": Notation(llama3_json, special=True),
    "mistral": Notation(mistral, special=True),
    "pythonic": Notation(pythonic),
}
"""By the name that `--tool-call-parser` has for it."""
