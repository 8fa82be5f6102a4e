"""GGUF files as the package `gguf` writes and reads them, and damaged ones."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFEndian,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
)

from pagefleet_worker.checkpoints.gguf_file import read_gguf
from pagefleet_worker.model_files import ModelError

KINDS = [GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_1", "Q6_K")]


@pytest.fixture
def generator() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def text(generator: random.Random) -> str:
    return "".join(generator.choices("aZ0 Ġéß漢🙂\n", k=generator.randrange(9)))


def values(generator: random.Random) -> dict[str, tuple[Any, GGUFValueType]]:
    whole, real = GGUFValueType.UINT64, GGUFValueType.FLOAT64
    return {
        "u8": (generator.randrange(2**8), GGUFValueType.UINT8),
        "i8": (generator.randrange(-(2**7), 2**7), GGUFValueType.INT8),
        "u16": (generator.randrange(2**16), GGUFValueType.UINT16),
        "i16": (generator.randrange(-(2**15), 2**15), GGUFValueType.INT16),
        "u32": (generator.randrange(2**32), GGUFValueType.UINT32),
        "i32": (generator.randrange(-(2**31), 2**31), GGUFValueType.INT32),
        "u64": (generator.randrange(2**64), whole),
        "i64": (generator.randrange(-(2**63), 2**63), GGUFValueType.INT64),
        "f32": (generator.randrange(1000) / 8, GGUFValueType.FLOAT32),
        "f64": (generator.random(), real),
        "bool": (generator.random() < 0.5, GGUFValueType.BOOL),
        "text": (text(generator), GGUFValueType.STRING),
        "texts": ([text(generator) for _ in range(99)] + ["x"], GGUFValueType.ARRAY),
        "numbers": ([generator.randrange(2**31) for _ in range(99)], GGUFValueType.ARRAY),
        "reals": ([generator.randrange(1000) / 8 for _ in range(9)], GGUFValueType.ARRAY),
    }


def write(
    path: Path, generator: random.Random, endianess: GGUFEndian = GGUFEndian.LITTLE
) -> dict[str, Any]:
    """A file of random values and tensors; the values."""
    written = values(generator)
    writer = GGUFWriter(path, "llama", endianess=endianess)
    writer.add_custom_alignment(generator.choice([8, 32, 64]))
    for key, (value, kind) in written.items():
        writer.add_key_value(key, value, kind)
    for kind in KINDS:
        elements, size = GGML_QUANT_SIZES[kind]
        rows, blocks = generator.randrange(1, 9), generator.randrange(1, 9)
        stored = np.frombuffer(generator.randbytes(rows * blocks * size), np.uint8)
        if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            data = stored.view(f"f{size}").reshape(rows, blocks * elements)
            writer.add_tensor(kind.name, data)
        else:
            writer.add_tensor(kind.name, stored.reshape(rows, -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {key: value for key, (value, _) in written.items()}


def test_values_and_tensors_are_those_of_the_package(
    tmp_path: Path, generator: random.Random
) -> None:
    path = tmp_path / "m.gguf"
    written = write(path, generator)
    found, theirs = read_gguf(path), GGUFReader(path)
    assert {key: found.metadata[key] for key in written} == written
    assert list(found.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = found.tensors[tensor.name]
        assert ours.kind == tensor.tensor_type
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.data.dtype, ours.data.shape) == (tensor.data.dtype, tensor.data.shape)
        assert ours.data.tobytes() == tensor.data.tobytes()


def test_a_damaged_file_is_refused_or_read(tmp_path: Path, generator: random.Random) -> None:
    """Whatever is wrong with it, nothing else is raised."""
    path = tmp_path / "m.gguf"
    write(path, generator)
    whole, refused = path.read_bytes(), 0
    for _ in range(500):
        cut = generator.choice([len(whole), generator.randrange(1, len(whole))])
        damaged = bytearray(whole[:cut])
        for _ in range(generator.randrange(3)):
            at = generator.randrange(len(damaged))
            damaged[at : at + 8] = generator.choice([bytes(8), b"\xff" * 8, generator.randbytes(8)])
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except ModelError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda whole: b"", "empty"),
        (lambda whole: b"PK" + whole[2:], "does not begin with GGUF"),
        (lambda whole: whole[:4] + b"\x01" + whole[5:], "has version 1, and only 2 and 3"),
        (lambda whole: whole[:-100], "ends before the end of 'Q6_K'"),
    ],
)
def test_what_is_wrong_is_said(
    change: Any, reason: str, tmp_path: Path, generator: random.Random
) -> None:
    path = tmp_path / "m.gguf"
    write(path, generator)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelError, match=reason):
        read_gguf(path)


def test_big_endian_files_are_refused(tmp_path: Path, generator: random.Random) -> None:
    write(tmp_path / "m.gguf", generator, GGUFEndian.BIG)
    with pytest.raises(ModelError, match="only 2 and 3 \\(little-endian\\)"):
        read_gguf(tmp_path / "m.gguf")
