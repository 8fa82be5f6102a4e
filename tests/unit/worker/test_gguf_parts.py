"""Models in several GGUF files: as one, and what is said where they do not fit together."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray

from pagefleet.manifest import Manifest
from pagefleet_worker.checkpoints.gguf_file import read_gguf, read_gguf_parts
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.preparation.gguf_model import gguf_model
from pagefleet_worker.preparation.gguf_parts import gguf_in, gguf_name, gguf_parts
from pagefleet_worker.prepare import prepare
from tests.gguf_models import write_gguf
from tests.models import make_model
from tests.unit.worker.test_weights import assert_equal, config_of, load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in Hugging Face's layout."""
    return make_model("llama", tmp_path_factory.mktemp("hf"))


def split(folder: Path, at: Path, tensors: int = 12) -> list[Path]:
    """The same in parts of so many tensors."""
    at.mkdir()
    return list(gguf_parts(write_gguf(at / "model.gguf", folder, ["F32"], split=tensors)))


def test_parts_are_one_model(folder: Path, tmp_path: Path) -> None:
    parts = split(folder, tmp_path / "parts")
    assert [part.name for part in parts] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    whole = read_gguf(write_gguf(tmp_path / "model.gguf", folder, ["F32"]))
    together = read_gguf_parts(parts)
    assert together.metadata.items() >= whole.metadata.items()
    assert list(together.tensors) == list(whole.tensors)
    for name, tensor in whole.tensors.items():
        assert np.array_equal(tensor.data, together.tensors[name].data)


def test_any_part_or_their_folder_names_the_model(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    parts = split(folder, tmp_path / "parts")
    tokenizer = str(folder / "tokenizer.json")
    for named in (*parts, tmp_path / "parts"):
        made = prepare(str(named), tmp_path / "cache", tokenizer=tokenizer)
        manifest = Manifest.load(made)
        assert manifest.name == "model"
        assert manifest.weights.paths == tuple(map(str, parts))
        assert made == prepare(str(parts[0]), tmp_path / "cache", tokenizer=tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert_equal(load(manifest.weights, config_of(made)), model.state_dict())


def test_another_last_part_is_another_model(folder: Path, tmp_path: Path) -> None:
    *_, last = split(folder, tmp_path / "parts")
    made = prepare(str(last.parent), tmp_path, tokenizer=str(folder / "tokenizer.json"))
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    again = prepare(str(last.parent), tmp_path, tokenizer=str(folder / "tokenizer.json"))
    assert again != made
    assert Manifest.load(again).fingerprint != Manifest.load(made).fingerprint


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(folder: Path, tmp_path: Path, missing: int) -> None:
    parts = split(folder, tmp_path / "parts")
    gone = parts.pop(missing)
    gone.unlink()
    for named in (*parts, tmp_path / "parts"):
        with pytest.raises(ModelError, match=f"one of 3 files of a model, .* lacks {gone.name}"):
            prepare(str(named), tmp_path)


def test_a_part_that_is_named_as_another_is_found(folder: Path, tmp_path: Path) -> None:
    first, second, third = split(folder, tmp_path / "parts")
    shutil.copy(third, second)
    with pytest.raises(ModelError, match=r"00002-of-00003.gguf says that it is number 2 "):
        prepare(str(first), tmp_path)
    alone = third.rename(tmp_path / "alone.gguf")
    with pytest.raises(ModelError, match=r"number 2 .* of 3 files of a model, not number 0 of 1"):
        prepare(str(alone), tmp_path)
    strange = first.rename(tmp_path / "m-00004-of-00003.gguf")
    with pytest.raises(ModelError, match="is no part of 3, by its name"):
        prepare(str(strange), tmp_path)


def test_a_part_of_another_model_is_found(folder: Path, tmp_path: Path) -> None:
    first, second, _ = split(folder, tmp_path / "parts")
    shutil.copy(split(folder, tmp_path / "others", 14)[1], second)
    with pytest.raises(ModelError, match="has tensors that others of its model's files have too"):
        prepare(str(first), tmp_path)
    write_part(second, 1, 3, {"another": np.zeros(32, np.float32)})
    with pytest.raises(ModelError, match=r"should have 30 tensors, and have \d+: one is of"):
        prepare(str(first), tmp_path)


def write_part(
    path: Path, number: int, count: int, tensors: Mapping[str, NDArray[Any]], **metadata: float
) -> None:
    """One of so many parts; keys of its metadata have dots in place of two underscores."""
    writer = GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    for key, value in metadata.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(key.replace("__", "."), value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_first_part_without_tensors(folder: Path, tmp_path: Path) -> None:
    """As llama-gguf-split --no-tensor-first-split leaves it."""
    only = write_gguf(tmp_path / "model.gguf", folder, ["F32"])
    file = read_gguf(only)
    first, second = (tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2))
    values = {key.replace(".", "__"): value for key, value in file.metadata.items()}
    write_part(first, 0, 2, {}, **{key: v for key, v in values.items() if key[:5] == "llama"})
    write_part(second, 1, 2, {name: tensor.data for name, tensor in file.tensors.items()})
    whole = gguf_model(only, "m", own_tokenizer=False)
    assert gguf_model(first, "m", own_tokenizer=False).config == whole.config


def test_a_folder_of_several_models_is_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"holds 2 GGUF models \(a, b\): name a file of one"):
        prepare(str(tmp_path), tmp_path / "cache")
    (tmp_path / "a.gguf").unlink()
    assert gguf_in(tmp_path) == tmp_path / "b-00001-of-00002.gguf"
    assert gguf_name(tmp_path / "b-00002-of-00002.gguf") == "b"
    (tmp_path / "model.safetensors").touch()
    assert gguf_in(tmp_path) is None
