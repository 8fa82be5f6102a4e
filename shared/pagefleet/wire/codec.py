"""Messages as frames: msgpack, followed by its checksum."""

import zlib
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec

from pagefleet.wire.gateways import (
    Abort,
    Credit,
    GatewayBeat,
    GatewayBye,
    GatewayHello,
    Moved,
    Outputs,
    Pulse,
    Rejected,
    Submit,
    Welcome,
)
from pagefleet.wire.memory import Inspect, Snapshot
from pagefleet.wire.parts import Message, Refused
from pagefleet.wire.workers import Fence, Join, Plan, Result, WorkerBeat, WorkerBye, WorkerHello

PROTOCOL = 3
"""Of messages; parties of different protocols refuse each other in the handshake."""

MOST_OUTPUTS = 16 * 2**20
"""Bytes of outputs in a frame, unless one output alone takes more. When a stream of many choices
goes on at another gateway, all of it is sent again, with logprobs: more than a frame may hold."""

_Decoded = TypeVar("_Decoded")
_CHECKSUM_BYTES = 4


ToScheduler: TypeAlias = (
    GatewayHello | Submit | Abort | Credit | GatewayBeat | GatewayBye | Inspect
    | WorkerHello | Result | WorkerBeat | WorkerBye
)  # fmt: skip
ToGateway: TypeAlias = Welcome | Pulse | Outputs | Rejected | Moved | Refused | Snapshot
ToWorker: TypeAlias = Join | Fence | Plan | Refused

FromGateway: TypeAlias = GatewayHello | Submit | Abort | Credit | GatewayBeat | GatewayBye | Inspect
FromWorker: TypeAlias = WorkerHello | Result | WorkerBeat | WorkerBye

_encoder = msgspec.msgpack.Encoder()
_from_gateway: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


class WireError(Exception):
    """Bytes that are no message of the expected direction."""


def encode(message: Message) -> bytes:
    """One frame."""
    return sealed(_encoder.encode(message))


def frames_of(message: Message) -> list[bytes]:
    """One frame; several if the message is outputs that are too many for one."""
    frame = encode(message)
    if len(frame) <= MOST_OUTPUTS or not isinstance(message, Outputs):
        return [frame]
    epoch, items, prompts = message.epoch, message.items, message.prompts
    if items and prompts:
        parts = [Outputs(epoch, [], prompts), Outputs(epoch, items)]
    elif len(items) > 1:
        middle = len(items) // 2
        parts = [Outputs(epoch, items[:middle]), Outputs(epoch, items[middle:])]
    else:
        return [frame]
    return [frame for part in parts for frame in frames_of(part)]


def size_of(part: msgspec.Struct) -> int:
    """Bytes that a part of a message takes in a frame."""
    return len(_encoder.encode(part))


def sealed(content: bytes) -> bytes:
    """Content, followed by its checksum."""
    return content + zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little")


def unsealed(frame: bytes) -> memoryview:
    """The content of a frame, without its checksum.

    Raises:
        WireError: it was damaged on the way.
    """
    content = memoryview(frame)[:-_CHECKSUM_BYTES]
    if frame[-_CHECKSUM_BYTES:] != zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little"):
        raise WireError("not a message: its checksum is wrong")
    return content


def _decode(decoder: "msgspec.msgpack.Decoder[_Decoded]", frame: bytes) -> _Decoded:
    """The message in a frame.

    Raises:
        WireError: the frame was damaged, is of another direction, or has a malformed field.
    """
    try:
        return decoder.decode(unsealed(frame))
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from error


decode_from_gateway: Callable[[bytes], FromGateway] = partial(_decode, _from_gateway)
"""What the scheduler gets from a gateway; raises `WireError`, as do the following."""

decode_from_worker: Callable[[bytes], FromWorker] = partial(_decode, _from_worker)
"""What the scheduler gets from a worker."""

decode_to_gateway: Callable[[bytes], ToGateway] = partial(_decode, _to_gateway)
"""What a gateway gets from the scheduler."""

decode_to_worker: Callable[[bytes], ToWorker] = partial(_decode, _to_worker)
"""What a worker gets from the scheduler."""
