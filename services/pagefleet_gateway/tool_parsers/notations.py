"""The notations by their names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pagefleet_gateway.tool_parsers.deepseek_v3 import deepseek_v3
from pagefleet_gateway.tool_parsers.glm45 import glm45
from pagefleet_gateway.tool_parsers.granite import granite
from pagefleet_gateway.tool_parsers.hermes import hermes
from pagefleet_gateway.tool_parsers.llama3_json import llama3_json
from pagefleet_gateway.tool_parsers.mistral import mistral
from pagefleet_gateway.tool_parsers.olmo3 import olmo3
from pagefleet_gateway.tool_parsers.openai import openai
from pagefleet_gateway.tool_parsers.parser import Script, ToolParser
from pagefleet_gateway.tool_parsers.phi4_mini_json import phi4_mini_json
from pagefleet_gateway.tool_parsers.pythonic import pythonic
from pagefleet_gateway.tool_parsers.qwen3_coder import qwen3_coder


@dataclass(frozen=True)
class Notation:
    """How models of a family write calls."""

    script: Callable[[ToolParser], Script]
    tagged: bool = False
    """Calls are objects between the tags of `hermes`."""


NOTATIONS: Final[dict[str, Notation]] = {
    "hermes": Notation(hermes, tagged=True),
    "qwen": Notation(hermes, tagged=True),
    "granite4": Notation(hermes, tagged=True),
    "llama3_json": Notation(llama3_json),
    "mistral": Notation(mistral),
    "pythonic": Notation(pythonic),
    "qwen3_coder": Notation(qwen3_coder),
    "qwen3_xml": Notation(qwen3_coder),
    "granite": Notation(granite),
    "phi4_mini_json": Notation(phi4_mini_json),
    "olmo3": Notation(olmo3),
    "deepseek_v3": Notation(deepseek_v3),
    "glm45": Notation(glm45),
    "glm47": Notation(glm45),
    "openai": Notation(openai),
}
"""By the name that `--tool-call-parser` has for it."""
