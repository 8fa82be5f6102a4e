"""A tokenizer and a generation config in place of a model's own, from the flag to the manifest."""

import json
import os
from array import array
from pathlib import Path

import pytest
from llguidance import grammar_from
from tokenizers import Tokenizer

from pagefleet.manifest import Manifest, SamplingDefaults
from pagefleet.params import Guide
from pagefleet.prepared import prepared_folder
from pagefleet.settings import GatewaySettings, WorkerSettings
from pagefleet_worker.grammar import Grammars
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.prepare import prepare
from tests.unit.worker.test_prepare import command, hf_folder


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    return prepare("echo", tmp_path_factory.mktemp("echo"))


@pytest.fixture(scope="module")
def model(tmp_path_factory, echo):
    """Its sampling is recommended, and its generation ends with 259 or 257."""
    return hf_folder(tmp_path_factory.mktemp("models") / "tiny", echo)


def swapped(echo: Path, path: Path, added: str | None = None) -> Path:
    """A tokenizer.json in which a is 98 and b is 97, and perhaps a token is added at the end."""
    content = json.loads((echo / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {"a": vocabulary["b"], "b": vocabulary["a"]}
    if added is not None:
        last = content["added_tokens"][-1]
        content["added_tokens"].append(last | {"id": last["id"] + 1, "content": added})
    path.write_text(json.dumps(content))
    return path


def ids(folder: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def test_another_tokenizer_makes_another_model(tmp_path, echo, model):
    other = swapped(echo, tmp_path / "tokenizer.json", "<|more|>")
    own = prepare(str(model), tmp_path)
    folder = prepare(str(model), tmp_path, tokenizer=str(other))
    assert folder != own
    assert (ids(own, "ab"), ids(folder, "ab<|more|>")) == ([97, 98], [98, 97, 260])
    before, after = Manifest.load(own), Manifest.load(folder)
    assert before.fingerprint != after.fingerprint
    assert (after.name, after.vocab_size) == (before.name, before.vocab_size)
    assert (after.eos_token, after.eos_token_ids) == ("<|eos|>", (259, 257))
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_a_tokenizers_folder_says_what_is_special_and_how_chats_read(tmp_path, echo, model):
    beside = tmp_path / "other"
    beside.mkdir()
    swapped(echo, beside / "tokenizer.json")
    (beside / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (beside / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    folder = prepare(str(model), tmp_path, tokenizer=str(beside))
    manifest = Manifest.load(folder)
    assert ids(folder, "ab") == [98, 97]
    assert (manifest.bos_token, manifest.eos_token) == ("<|bos|>", "<|im_end|>")
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[-1].content }}"


def test_a_tokenizer_that_changes_makes_another_folder(tmp_path, echo):
    other = swapped(echo, tmp_path / "tokenizer.json")
    first = prepare("echo", tmp_path, tokenizer=str(other))
    assert prepare("echo", tmp_path, tokenizer=str(other)) == first
    assert prepare("echo", tmp_path) != first
    os.utime(other, ns=(0, 0))
    assert prepare("echo", tmp_path, tokenizer=str(other)) != first


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path, echo, model):
    content = json.loads((echo / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"<{number}>": number for number in range(260, 301)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="has a token 300, and the model only 300") as refused:
        prepare(str(model), tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    assert "the tokenizer of another model" in str(refused.value)


def test_added_tokens_that_the_model_has_no_row_for_are_text(tmp_path, echo):
    """Gemma 3's tokenizer has one for images, its models of text do not know it."""
    other = swapped(echo, tmp_path / "tokenizer.json", "<|more|>")
    folder = prepare("echo", tmp_path, tokenizer=str(other))
    manifest = Manifest.load(folder)
    assert ids(folder, "<|eos|><|more|>") == [257, *(ord(each) for each in "<|more|>")]
    guide = Guide(grammar_from("regex", "b"))
    mask = Grammars.load(folder, manifest).begin(guide).mask(array("i"))
    assert [at for at in range(manifest.vocab_size) if mask[at >> 3] >> (at & 7) & 1] == [97]


def test_a_generation_config_is_all_that_is_recommended(tmp_path, model):
    own = Manifest.load(prepare(str(model), tmp_path))
    assert own.sampling == SamplingDefaults(temperature=0.6, top_k=20)
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5, "eos_token_id": 258}')
    other = Manifest.load(prepare(str(model), tmp_path, generation_config=str(tmp_path)))
    assert other.sampling == SamplingDefaults(top_p=0.5)
    assert other.eos_token_ids == (258, 257)
    neutral = [prepare(str(model), tmp_path, generation_config=word) for word in ("none", "vllm")]
    for manifest in map(Manifest.load, neutral):
        assert manifest.sampling == SamplingDefaults()
        assert manifest.eos_token_ids == own.eos_token_ids
    assert own.fingerprint == other.fingerprint == manifest.fingerprint


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"tokenizer": "{}/nowhere"}, "There is no tokenizer at .*nowhere"),
        ({"tokenizer": "{}/odd.json"}, "odd.json is no tokenizer.json"),
        ({"tokenizer": "{}"}, "cannot load the tokenizer in"),
        ({"generation_config": "{}/nowhere"}, "There is no generation config at .*nowhere"),
        ({"generation_config": "{}"}, "lacks generation_config.json"),
    ],
)
def test_parts_that_are_none_are_refused(tmp_path, parts, reason):
    (tmp_path / "odd.json").write_text('{"eos_token": "x"}')
    named = {part: name.format(tmp_path) for part, name in parts.items()}
    with pytest.raises((ModelError, FileNotFoundError), match=reason):
        prepare("echo", tmp_path, **named)


def test_the_parts_of_a_prepared_model_are_chosen(tmp_path, echo):
    process = command(str(echo), "--cache", str(tmp_path), "--generation-config=none")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"{echo} is prepared already" in said
    assert "Traceback" not in said


def test_services_that_are_told_the_same_agree(tmp_path, echo, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = str(swapped(echo, tmp_path / "tokenizer.json"))
    folders = {
        prepared_folder(cls(model="echo", tokenizer=other, generation_config="vllm"))
        for cls in (GatewaySettings, WorkerSettings)
    }
    assert len(folders) == 1
    assert ids(folders.pop(), "ab") == [98, 97]
    assert prepared_folder(GatewaySettings(model=str(echo))) == echo
