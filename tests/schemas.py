"""Random small JSON schemas with short texts: what llguidance supports, in all combinations."""

import random
from typing import Any

WORDS = ("a", "name", "é", 'quo"te', "two words", "x/y", "")


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """Every string, number and array in it is bounded."""
    kinds = [_string, _integer, _number, _constant, _plain]
    if depth:
        kinds += [_object, _array, _union] * 2
    return draw.choice(kinds)(draw, depth)


def _plain(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"type": draw.choice(["null", "boolean"])}


def _string(draw: random.Random, depth: int) -> dict[str, Any]:
    return draw.choice(
        [
            {"type": "string", "maxLength": draw.randint(1, 6)},
            {"type": "string", "pattern": r"^[a-f]{1,3}-\d$"},
            {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])},
        ]
    )


def _integer(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(-200, 200)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 1000)}


def _number(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(-9, 9)
    return {"type": "number", "minimum": low, "maximum": low + draw.choice([0.5, 3])}


def _constant(draw: random.Random, depth: int) -> dict[str, Any]:
    values = draw.sample([*WORDS, 1, -2.5, None, True, [1, "b"], {"k": 0}], 3)
    return draw.choice([{"const": values[0]}, {"enum": values}])


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth - 1) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(0, 2)
    return {
        "type": "array",
        "items": random_schema(draw, depth - 1),
        "minItems": low,
        "maxItems": low + draw.randint(0, 2),
    }


def _union(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
