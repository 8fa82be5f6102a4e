"""What messages are made of: lists of numbers as bytes, bounded numbers, parts of several."""

import sys
import zlib
from array import array
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, TypeAlias, TypeVar

import msgspec

_Number = TypeVar("_Number", int, float)

_LITTLE_ENDIAN = sys.byteorder == "little"

Ints: TypeAlias = bytes
"""Little-endian int32, one after another."""

Floats: TypeAlias = bytes
"""Little-endian float32, one after another."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A number of things, or the index of one, that fits into `Ints`."""

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
"""A number of things of which each is kept track of."""

Numerics: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
"""CRC-32 of the name of a class of numerics, whose workers compute equal bits; 0: not known."""

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Micros: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


def pack_ints(values: Iterable[int]) -> Ints:
    """Encode integers of 32 bits.

    Raises:
        OverflowError: one does not fit.
    """
    if not (isinstance(values, array) and values.typecode == "i"):
        values = array("i", values)
    return values.tobytes() if _LITTLE_ENDIAN else _swapped(values).tobytes()


def unpack_ints(packed: Ints) -> "array[int]":
    """Decode what `pack_ints` encoded.

    Raises:
        ValueError: the length is not a multiple of four bytes.
    """
    values = array("i")
    values.frombytes(packed)
    return values if _LITTLE_ENDIAN else _swapped(values)


def pack_floats(values: Iterable[float]) -> Floats:
    """Encode numbers as float32."""
    floats = array("f", values)
    return floats.tobytes() if _LITTLE_ENDIAN else _swapped(floats).tobytes()


def unpack_floats(packed: Floats) -> "array[float]":
    """Decode what `pack_floats` encoded."""
    values = array("f")
    values.frombytes(packed)
    return values if _LITTLE_ENDIAN else _swapped(values)


def _swapped(values: "array[_Number]") -> "array[_Number]":
    values = values[:]
    values.byteswap()
    return values


def checksum(table: Ints, before: int = 0) -> int:
    """CRC-32 of a block table as a signed 32-bit integer; `before` is that of the part before."""
    crc = zlib.crc32(table, before & 0xFFFFFFFF)
    return crc - (1 << 32) if crc >= 1 << 31 else crc


def numerics_of(name: str) -> Numerics:
    """The number that stands for a class of numerics in messages."""
    return zlib.crc32(name.encode()) or 1


class Message(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Base of all messages: an array, tagged with the name of its class.

    Neither messages nor their parts can refer to themselves, so that the garbage collector need not
    follow them.
    """


def check_ints(*fields: Ints) -> None:
    """Refuse, already while decoding, what is no list of 32-bit numbers.

    Raises:
        ValueError: a length is not a multiple of four bytes.
    """
    for field in fields:
        if len(field) % 4:
            raise ValueError(f"{len(field)} bytes are no integers of 32 bits")


class Part(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of what messages are made of."""


class Finish(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    """An end-of-sequence or stop token; it is the last of the choice's tokens."""
    LENGTH = "length"
    TIMEOUT = "timeout"
    """The request's deadline passed."""
    ABORT = "abort"
    ERROR = "error"


class Logprobs(Part, frozen=True):
    """Logprobs of m consecutive tokens, each with the same number k of alternatives.

    They are the model's own: before temperature, penalties and masks.
    """

    chosen: Floats
    """[m]"""
    top_ids: Ints
    """[m, k], most likely first."""
    top: Floats
    """[m, k]"""

    def __post_init__(self) -> None:
        """Refuse lists whose lengths do not fit each other."""
        check_ints(self.chosen, self.top_ids)
        tokens, alternatives = len(self.chosen), len(self.top_ids)
        if alternatives != len(self.top) or (alternatives % tokens if tokens else alternatives):
            raise ValueError("the tokens do not have equally many alternatives")


class ChoiceState(Part, frozen=True):
    """What a gateway has received of one choice: all that is needed, with the prompt, to go on."""

    index: Count
    """The choice's number over the whole HTTP request; part of the sampler's counter."""
    tokens: Ints = b""
    finished: bool = False
    numerics: Numerics = 0
    """The class that computed the latest of them; without tokens, of those to generate again."""

    def __post_init__(self) -> None:
        """Refuse what cannot be unpacked."""
        check_ints(self.tokens)


class Refused(Message, frozen=True):
    """The handshake failed: we cannot work together."""

    text: str
