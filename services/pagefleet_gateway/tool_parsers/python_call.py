"""A call in Python's notation, whose arguments are keywords with literals, as a name and JSON."""

import ast
import json
import warnings

from pagefleet_gateway.tool_parsers.parser import MalformedError


def evaluated(source: str) -> tuple[str, str]:
    """What is called, and the arguments as a JSON object; nothing is run.

    Raises:
        MalformedError: it is no such call, or JSON has no such value.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise MalformedError("arguments have names")
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        if None in [keyword.arg for keyword in call.keywords]:
            raise MalformedError("arguments have names")
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedError("no call of Python's with literals") from error
    return source.partition("(")[0], arguments
