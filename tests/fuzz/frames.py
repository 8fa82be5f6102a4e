"""Messages of every type with any values, and damage to messages that leaves them readable.

Damage is done beneath the checksum, which would otherwise hide the decoder and all behind it: to
the tree that a message is in msgpack, so that most of it is still a message, or to its bytes.
"""

import math
import random
from functools import cache
from typing import Any

import msgpack
import msgspec
from msgspec import inspect

from pagefleet import wire
from pagefleet.params import Guide, SamplingParams

MESSAGES = wire.ToScheduler | wire.ToGateway | wire.ToWorker

_INTS = (
    *(0, 0, 0, 1, 1, 2, 3, -1, 5, 7, 8, 15, 16, 31, 63, 127, 128, 255, 256, 1000),
    *(2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**31), -(2**63)),
)
_FLOATS = (0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e308, 5e-324, 1e9)
_TEXTS = ("", "r0", "r1", "r2", "echo", "stop", "length", "é\u202e", "x" * 300)
_PARAMS = (
    SamplingParams(max_tokens=4, seed=1, temperature=0.0),
    SamplingParams(max_tokens=0, seed=2, prompt_logprobs=2),
    SamplingParams(max_tokens=9, seed=3, logprobs=3, frequency_penalty=1.0, min_tokens=2),
    SamplingParams(max_tokens=6, seed=2**64 - 1, beam_width=3, length_penalty=0.0),
    SamplingParams(max_tokens=8, seed=4, guide=Guide('start: "a"+')),
    SamplingParams(max_tokens=10**9, seed=5, stop_token_ids=(1, 2), allowed_token_ids=(1, 2, 3)),
)


@cache
def _types() -> tuple[inspect.StructType, ...]:
    """All messages."""
    union = inspect.type_info(MESSAGES)
    assert isinstance(union, inspect.UnionType)
    return tuple(each for each in union.types if isinstance(each, inspect.StructType))


class Frames:
    """Draws them; all that is drawn follows from the generator that it is given."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def message(self) -> bytes:
        """The msgpack of any message, its types right and its values anything."""
        return msgpack.packb(self._value(self._draw.choice(_types())))

    def damaged(self, content: bytes) -> bytes:
        """The msgpack of a message, changed."""
        if self._draw.random() < 0.2:
            return self._damaged_bytes(content)
        tree = msgpack.unpackb(content, strict_map_key=False)
        for _ in range(self._draw.choice((1, 1, 1, 2, 5))):
            tree = self._damaged_tree(tree)
        return msgpack.packb(tree)

    def noise(self) -> bytes:
        """Anything; some of it looks like the beginning of msgpack."""
        return self._draw.choice(
            (b"", b"\x9d\xa4Plan", b"\xdd\xff\xff\xff\xff", b"\x91" * 2000)
        ) + (self._draw.randbytes(self._draw.randrange(60)))

    def _value(self, kind: inspect.Type) -> Any:
        draw = self._draw
        match kind:
            case inspect.StructType(cls=cls) if cls is SamplingParams:
                return msgspec.to_builtins(draw.choice(_PARAMS))
            case inspect.StructType(tag=tag, fields=fields):
                values = [self._value(field.type) for field in fields]
                return values if tag is None else [tag, *values]
            case inspect.UnionType(types=types):
                return self._value(draw.choice(types))
            case inspect.ListType(item_type=item):
                return [self._value(item) for _ in range(draw.choice((0, 1, 1, 2, 4)))]
            case inspect.TupleType(item_types=items):
                return [self._value(item) for item in items]
            case inspect.DictType(key_type=key, value_type=value):
                return {self._value(key): self._value(value) for _ in range(draw.randrange(3))}
            case inspect.EnumType(cls=cls):
                return draw.choice(list(cls)).value
            case _:
                return self._scalar(kind)

    def _scalar(self, kind: inspect.Type) -> Any:
        draw = self._draw
        match kind:
            case inspect.IntType():
                return draw.choice(_INTS)
            case inspect.FloatType():
                return draw.choice(_FLOATS)
            case inspect.StrType():
                return draw.choice(_TEXTS)
            case inspect.BytesType():
                return self._packed()
            case inspect.BoolType():
                return draw.random() < 0.5
            case inspect.NoneType():
                return None
        raise AssertionError(f"messages have no {kind}")

    def _packed(self) -> bytes:
        values = [self._draw.choice(_INTS) for _ in range(self._draw.randrange(14))]
        return wire.pack_ints(value for value in values if -(2**31) <= value < 2**31)

    def _damaged_bytes(self, content: bytes) -> bytes:
        draw, changed = self._draw, bytearray(content)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(changed) + 1)
            match draw.randrange(3):
                case 0:
                    changed[at : at + 1] = draw.randbytes(1)
                case 1:
                    changed[at:at] = changed[at : at + draw.randrange(1, 9)]
                case _:
                    del changed[at : at + draw.randrange(1, 9)]
        return bytes(changed)

    def _damaged_tree(self, node: Any) -> Any:
        """Somewhere in the tree, a value is another one, or a list has more or fewer."""
        draw = self._draw
        if isinstance(node, list) and node and draw.random() < 0.9:
            at = draw.randrange(len(node))
            match draw.randrange(12):
                case 0:
                    return node[:at] + node[at + 1 :]
                case 1:
                    return [*node[:at], node[at], *node[at:]]
                case 2:
                    return [*node[:at], draw.choice(node), *node[at + 1 :]]
            return [*node[:at], self._damaged_tree(node[at]), *node[at + 1 :]]
        if isinstance(node, dict) and node:
            key = draw.choice(list(node))
            return {**node, draw.choice(_INTS): node[key], key: self._damaged_tree(node[key])}
        return self._damaged_scalar(node)

    def _damaged_scalar(self, node: Any) -> Any:
        draw = self._draw
        if draw.random() < 0.05:
            return draw.choice((None, True, [], {}, "", b"", 0, 0.5, msgpack.Timestamp(0, 0)))
        match node:
            case bool():
                return not node
            case int():
                return draw.choice((*_INTS, min(node + 1, 2**64 - 1), max(node - 1, -(2**63))))
            case float():
                return draw.choice(_FLOATS)
            case str():
                return draw.choice(_TEXTS)
            case bytes() if len(node) >= 4 and draw.random() < 0.7:
                at = draw.randrange(len(node) // 4) * 4
                return node[:at] + self._packed()[:4] + node[at + 4 * draw.randrange(2) :]
            case bytes():
                return self._packed()
        return draw.choice((None, 0, 1, "", [], self._packed()))
