"""What is in a GGUF file (ggml, docs/gguf.md): metadata, and tensors as they lie there.

    magic, version, counts | key, type, value ... | name, shape, kind, offset ... | padding | data

Everything before the data is read front to back, without an index. The `gguf` package's reader
makes several numpy arrays of every string, which takes 6 s at every start where a vocabulary has
128,000 tokens and as many merges.

A model may be split (llama.cpp, tools/gguf-split). The first part has the metadata; each has some
tensors, its number (`split.no`, counting from 0), how many parts there are (`split.count`), and how
many tensors they have together (`split.tensors.count`).
"""

import math
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)
from numpy.typing import NDArray

from pagefleet_worker.model_files import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)

_SIZE = struct.Struct("<Q")

_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}
"""Of numbers, in terms of `struct` and of numpy."""

_FLOATS = {GGMLQuantizationType.F32: "<f4", GGMLQuantizationType.F16: "<f2"}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in the mapped file.

    shape: rows first, as torch has it. data: read-only, float32 or float16 of that shape, or else
    uint8 whose last axis are the bytes of a row.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: NDArray[Any]

    def part(self, number: int) -> "GgufTensor | None":
        """One of the matrices, or vectors, that a tensor holds, if it has so many."""
        if len(self.shape) < 2 or number >= self.shape[0]:
            return None
        return GgufTensor(self.kind, self.shape[1:], self.data[number])

    def as_row(self) -> "GgufTensor":
        """The only row of a matrix, which files hold as a vector."""
        return GgufTensor(self.kind, (1, *self.shape), self.data[None])


@dataclass(frozen=True)
class GgufFile:
    """Values by their keys, tensors by their names."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the file's header; tensors are mapped, not read.

    Raises:
        ModelError: it is no such file, or a damaged one.
        OSError: it cannot be opened.
    """
    try:
        with path.open("rb") as file:
            return _read(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (ValueError, OverflowError, struct.error) as error:
        raise ModelError(
            f"{path} is no GGUF file that can be read: {error}. Download or convert it again."
        ) from error


def read_gguf_parts(paths: Sequence[Path]) -> GgufFile:
    """A file, or all parts of one, in their order, as if they were one.

    Raises:
        ModelError: they do not belong together, or one is no such file, or a damaged one.
        OSError: one cannot be opened.
    """
    parts = [read_gguf(path) for path in paths]
    tensors: dict[str, GgufTensor] = {}
    for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
        said = part.metadata.get("split.no", 0), part.metadata.get("split.count") or 1
        if said != (number, len(paths)):
            raise ModelError(
                f"{path} says that it is number {said[0]} (counting from 0) of {said[1]} files of "
                f"a model, not number {number} of {len(paths)}. Give it the name that it had, as "
                "model-00001-of-00003.gguf, beside the others."
            )
        if foreign := tensors.keys() & part.tensors.keys():
            raise ModelError(
                f"{path} has tensors that others of its model's files have too ({min(foreign)!r}): "
                "it is of another one. Download it again."
            )
        tensors |= part.tensors
    metadata = parts[0].metadata
    if (count := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise ModelError(
            f"{paths[0]} and the files that belong to it should have {count} tensors, and have "
            f"{len(tensors)}: one is of another model. Download them again."
        )
    return GgufFile(metadata, tensors)


def _read(content: mmap.mmap) -> GgufFile:
    if content[:4] != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    header = _Header(content)
    if (version := header.number("I")) not in _VERSIONS:
        raise ValueError(f"it has version {version}, and only 2 and 3 (little-endian) are known")
    tensors, values = header.number("Q"), header.number("Q")
    metadata = {header.string(): header.value() for _ in range(values)}
    placed = {header.string(): header.place() for _ in range(tensors)}
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    start = -(-header.at // alignment) * alignment
    return GgufFile(
        metadata,
        {name: _tensor(content, start, name, *place) for name, place in placed.items()},
    )


class _Header:
    """Reads what lies before the data; `at` is how far it is, in bytes."""

    def __init__(self, content: mmap.mmap) -> None:
        self.at = len(_MAGIC)
        self._content = content

    def number(self, format: str) -> Any:
        (value,) = struct.unpack_from(f"<{format}", self._content, self.at)
        self.at += struct.calcsize(f"<{format}")
        return value

    def string(self) -> str:
        [text] = self._strings(1)
        return text

    def value(self) -> Any:
        """A number, a text, or a list of either."""
        kind = GGUFValueType(self.number("I"))
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.number(_FORMATS[kind])
        kind, count = GGUFValueType(self.number("I")), self.number("Q")
        if kind == GGUFValueType.STRING:
            return self._strings(count)
        if kind == GGUFValueType.ARRAY:
            raise ValueError("it has lists of lists, of which nothing is known")
        return self._numbers(f"<{_FORMATS[kind]}", count)

    def place(self) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
        """A tensor's shape, kind and offset."""
        sizes = [self.number("Q") for _ in range(self.number("I"))]
        return tuple(reversed(sizes)), GGMLQuantizationType(self.number("I")), self.number("Q")

    def _numbers(self, dtype: str, count: int) -> list[Any]:
        values = np.frombuffer(self._content, dtype, count, self.at)
        self.at += values.nbytes
        return list(values.tolist())

    def _strings(self, count: int) -> list[str]:
        content, at, texts = self._content, self.at, []
        for _ in range(count):
            (size,) = _SIZE.unpack_from(content, at)
            first = at + _SIZE.size
            at = first + size
            if at > len(content):
                raise ValueError("it ends within a text")
            texts.append(content[first:at].decode())
        self.at = at
        return texts


def _tensor(
    content: mmap.mmap,
    start: int,
    name: str,
    shape: tuple[int, ...],
    kind: GGMLQuantizationType,
    offset: int,
) -> GgufTensor:
    elements, size = GGML_QUANT_SIZES[kind]
    *rows, columns = shape
    if columns % elements:
        raise ValueError(f"{name!r} has rows of {columns}, which are no whole {kind.name} blocks")
    stored = (*rows, columns // elements * size)
    first, count = start + offset, math.prod(stored)
    if first + count > len(content):
        raise ValueError(f"it ends before the end of {name!r}")
    data = np.frombuffer(content, np.uint8, count, first).reshape(stored)
    return GgufTensor(kind, shape, data.view(_FLOATS[kind]) if kind in _FLOATS else data)
