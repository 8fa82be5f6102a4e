"""Python's notation of values, and of calls whose arguments are keywords with such values.

Models mix it with JSON's: `true`, `false` and `null` are what they are there.
"""

import ast
import json
import warnings
from typing import Any, Final

from pagefleet_gateway.tool_parsers.parser import MalformedError

_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_ERRORS: Final = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
"""Raised by `ast` for what is no literal."""


def literal(source: str) -> Any:
    """The value that a literal stands for.

    Raises:
        MalformedError: it is none.
    """
    try:
        return _value(_expression(source))
    except _ERRORS as error:
        raise MalformedError("no literal of Python's") from error


def json_text(value: Any) -> str:
    """A value of Python's as JSON.

    Raises:
        TypeError, ValueError: JSON has no such value, or it holds half a surrogate pair.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def evaluated(source: str) -> tuple[str, str]:
    """What is called, and the arguments as a JSON object; nothing is run.

    Raises:
        MalformedError: it is no such call, or JSON has no such value.
    """
    try:
        call = _expression(source)
        if not isinstance(call, ast.Call) or call.args:
            raise MalformedError("arguments have names")
        values = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        if None in [keyword.arg for keyword in call.keywords]:
            raise MalformedError("arguments have names")
        arguments = json_text(values)
    except _ERRORS as error:
        raise MalformedError("no call of Python's with literals") from error
    return source.partition("(")[0], arguments


def _expression(source: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source, mode="eval").body


def _value(node: ast.expr) -> Any:
    return ast.literal_eval(_Constants().visit(node))


class _Constants(ast.NodeTransformer):
    """Replaces names of constants by them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
