"""`pagefleet tap ENDPOINT`: the traffic of a cell, a line a message.

The cell must have been started with `--tap-endpoint=ENDPOINT`. Frames are decoded by the package
`msgpack`, independently of the encoder that the services use; only the names of the fields are
taken from `pagefleet.wire`. Prompts and answers are shown as tokens. What a cell of another version
says in its own way is shown without names. Ctrl-C ends it.
"""

import argparse
import sys
import time
import types
import typing
import zlib
from array import array
from collections.abc import Sequence
from typing import Any, TypeGuard

import msgpack  # type: ignore[import-untyped]
import msgspec

from pagefleet import wire
from pagefleet_launcher.showing import show

_CHECKSUM_BYTES = 4
_LONGEST_LIST = 16
"""Numbers of a list that are shown."""

_FLOATS = frozenset({"chosen", "top"})
_RAW = frozenset({"salt", "map"})


def main(argv: Sequence[str]) -> int:
    """Print until interrupted; returns the status to exit with."""
    endpoint = _parser().parse_args(argv).endpoint
    import zmq  # only here, so that `pagefleet serve` starts without it

    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            socket.connect(endpoint)
            print(
                f"Messages of the cell that was started with --tap-endpoint={endpoint}, until "
                "Ctrl-C.",
                file=sys.stderr,
            )
            while True:
                direction, side, peer, frame = msgpack.unpackb(socket.recv())
                content = unsealed(frame)
                values = content and msgpack.unpackb(content, strict_map_key=False)
                text = describe(values) if values else "a damaged frame"
                who = f"{side.decode():7} {peer.hex()[:8]}"
                show(f"{_clock()} {who} {direction.decode()} {text}")
        except KeyboardInterrupt:
            return 0
        except zmq.ZMQError as error:
            print(
                f"pagefleet tap: {endpoint}: {error}; write what the cell has as --tap-endpoint, "
                "for example ipc:///tmp/pagefleet-tap",
                file=sys.stderr,
            )
            return 1


def unsealed(frame: bytes) -> bytes | None:
    """A frame without its checksum, or None if that is wrong."""
    content, seal = frame[:-_CHECKSUM_BYTES], frame[-_CHECKSUM_BYTES:]
    return content if seal == zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little") else None


def describe(values: Sequence[Any]) -> str:
    """A decoded message: its name, and its fields by their names, if this version knows them."""
    name, *fields = values
    message = getattr(wire, name, None)
    if not _is_of(message, values):
        return f"{name}, of another version: {fields}"
    return " ".join([name, *_named(message, fields)])


def _is_of(message: Any, values: Sequence[Any]) -> "TypeGuard[type[msgspec.Struct]]":
    if not (isinstance(message, type) and issubclass(message, msgspec.Struct)):
        return False
    try:
        msgspec.convert(values, message)
    except msgspec.ValidationError:
        return False
    return len(values) <= len(message.__struct_fields__) + 1


def _named(cls: "type[msgspec.Struct]", values: Sequence[Any]) -> list[str]:
    hints = typing.get_type_hints(cls)
    pairs = zip(cls.__struct_fields__, values, strict=False)
    return [f"{name}={_shown(name, value, _plain(hints[name]))}" for name, value in pairs]


def _shown(name: str, value: Any, hint: Any) -> str:
    match value:
        case bytes() if name in _RAW:
            return value.hex() or "-"
        case bytes():
            return _numbers(array("f" if name in _FLOATS else "i", value))
        case list() if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return f"({' '.join(_named(hint, value))})"
        case list():
            item, *_ = typing.get_args(hint)
            return f"[{', '.join(_shown(name, each, item) for each in value)}]"
        case float():
            return f"{value:.6g}"
    return str(value)


def _plain(hint: Any) -> Any:
    """A field's type without None."""
    kinds = [each for each in typing.get_args(hint) if each is not types.NoneType]
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return kinds[0] if is_union else hint


def _numbers(values: "array[Any]") -> str:
    shown = [f"{value:.6g}" for value in values[:_LONGEST_LIST]]
    rest = len(values) - len(shown)
    return f"[{' '.join(shown)}{f' and {rest} more' if rest else ''}]"


def _clock() -> str:
    now = time.time()
    return time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now * 1000) % 1000:03}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagefleet tap", description=(__doc__ or "").partition("\n\n")[2], allow_abbrev=False
    )
    parser.add_argument("endpoint", help="what the cell was started with as --tap-endpoint")
    return parser
