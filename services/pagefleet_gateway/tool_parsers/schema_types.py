"""Which types of JSON a schema takes, as far as a quick look at it tells."""

from collections.abc import Mapping
from typing import Any, Final

ALL_TYPES: Final = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_DEFINITIONS: Final = "#/$defs/"
_MOST: Final = 256
"""Alternatives that are looked at."""


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema names; all, where it does not say.

    root: where its references lead.
    """
    types: set[str] = set()
    left, seen = [schema], set()
    for _ in range(_MOST):
        if not left:
            return ALL_TYPES & types or ALL_TYPES
        each = left.pop()
        if not isinstance(each, Mapping):
            break
        reference = each.get("$ref")
        alternatives = each.get("anyOf", each.get("oneOf"))
        if isinstance(reference, str):
            left += [] if reference in seen else [_definition(reference, root)]
            seen.add(reference)
        elif isinstance(alternatives, list):
            left += alternatives
        else:
            types |= _named(each)
    return ALL_TYPES


def kinds(value: Any) -> frozenset[str]:
    """The types that a value of JSON is of."""
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
        case str():
            return frozenset({"string"})
        case None:
            return frozenset({"null"})
        case list() | tuple():
            return frozenset({"array"})
    return frozenset({"object"})


def _definition(reference: str, root: Mapping[str, Any]) -> Any:
    definitions = root.get("$defs")
    if not isinstance(definitions, Mapping) or not reference.startswith(_DEFINITIONS):
        return None
    return definitions.get(reference.removeprefix(_DEFINITIONS))


def _named(schema: Mapping[str, Any]) -> frozenset[str]:
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset({types})
    if isinstance(types, list):
        return frozenset(each for each in types if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset().union(*map(kinds, values))
    return ALL_TYPES
