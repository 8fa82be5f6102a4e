"""A tokenizer and a generation config in place of a model's own, and LoRA adapters beside it, from
the flag to the manifest.
"""

import json
import os
from array import array
from pathlib import Path

import pytest
from llguidance import grammar_from
from tokenizers import Tokenizer

from pagefleet.manifest import Adapter, Manifest, SamplingDefaults
from pagefleet.params import Guide
from pagefleet.prepared import prepared_folder
from pagefleet.settings import GatewaySettings, WorkerSettings
from pagefleet_worker.grammar import Grammars
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.prepare import prepare
from tests.unit.worker.test_prepare import CONFIG, command, hf_folder

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
}


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
        ({"lora": "{}/nowhere"}, "There is no folder of the LoRA adapter 'sql' at .*nowhere"),
        ({"lora": "{}/odd.json"}, "There is no folder of the LoRA adapter 'sql' at .*odd.json"),
    ],
)
def test_parts_that_are_none_are_refused(tmp_path, parts, reason):
    (tmp_path / "odd.json").write_text('{"eos_token": "x"}')
    named = {part: name.format(tmp_path) for part, name in parts.items()}
    if folder := named.pop("lora", None):
        named["adapters"] = {"sql": folder}
    with pytest.raises((ModelError, FileNotFoundError), match=reason):
        prepare("echo", tmp_path, **named)


@pytest.mark.parametrize("option", ["--generation-config=none", "--lora-modules=a=/"])
def test_the_parts_of_a_prepared_model_are_chosen(tmp_path, echo, option):
    process = command(str(echo), "--cache", str(tmp_path), option)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"{echo} is prepared already" in said
    assert "Traceback" not in said


def test_services_that_are_told_the_same_agree(tmp_path, echo, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = str(swapped(echo, tmp_path / "tokenizer.json"))
    told = {"tokenizer": other, "generation_config": "vllm", "lora_modules": f"sql={tmp_path}"}
    folders = {
        prepared_folder(cls(model="echo", **told)) for cls in (GatewaySettings, WorkerSettings)
    }
    assert len(folders) == 1
    (folder,) = folders
    assert ids(folder, "ab") == [98, 97]
    assert Manifest.load(folder).adapters == (Adapter("sql", str(tmp_path)),)
    assert prepared_folder(GatewaySettings(model=str(echo))) == echo


def adapter(folder: Path, config: str = "{}", weights: bytes = b"") -> str:
    """A folder with an adapter's files, of which an echo model reads nothing."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def test_adapters_are_told_in_their_order(tmp_path):
    named = {"sql": adapter(tmp_path / "b"), "poet": adapter(tmp_path / "a")}
    manifest = Manifest.load(prepare("echo", tmp_path, adapters=named))
    assert manifest.adapters == (
        Adapter("sql", str(tmp_path / "b")),
        Adapter("poet", str(tmp_path / "a")),
    )


def test_processes_with_other_adapters_are_no_cell(tmp_path):
    """Their fingerprints differ by what lies in the folders, by the names, and by the order."""
    one, other = adapter(tmp_path / "1"), adapter(tmp_path / "2", weights=bytes(9))
    long = [adapter(tmp_path / f"long{n}", weights=bytes(2**21) + bytes([n])) for n in range(2)]
    config = adapter(tmp_path / "3", config='{"r": 8}')
    (tmp_path / "empty").mkdir()
    cells = [
        {},
        *({"a": folder} for folder in (one, other, config, *long, str(tmp_path / "empty"))),
        {"b": one},
        {"a": one, "b": other},
        {"b": other, "a": one},
        {"a": other, "b": one},
    ]
    manifests = [Manifest.load(prepare("echo", tmp_path, adapters=named)) for named in cells]
    assert len({manifest.fingerprint for manifest in manifests}) == len(cells)


def test_a_copy_of_an_adapter_elsewhere_is_the_same_model(tmp_path):
    """On another machine, beside files that PEFT does not read."""
    here, there = (adapter(tmp_path / where, weights=bytes(99)) for where in ("here", "there"))
    (tmp_path / "there/README.md").write_text("An adapter.")
    folders = [prepare("echo", tmp_path, adapters={"a": each}) for each in (here, there)]
    assert folders[0] != folders[1]
    assert len({Manifest.load(folder).fingerprint for folder in folders}) == 1


def test_an_adapter_that_changes_is_prepared_again(tmp_path):
    named = {"a": adapter(tmp_path / "a")}
    before = prepare("echo", tmp_path, adapters=named)
    assert prepare("echo", tmp_path, adapters=named) == before
    adapter(tmp_path / "a", weights=b"more")
    after = prepare("echo", tmp_path, adapters=named)
    assert Manifest.load(before).fingerprint != Manifest.load(after).fingerprint
    assert prepare("echo", tmp_path) not in (before, after)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_an_adapter_that_cannot_be_served_is_refused_at_once(tmp_path, echo, architecture):
    """Before there is anything that could be served; what `read_adapter` refuses is its own test's
    matter.
    """
    config = CONFIG | {"model_type": architecture, **SIZES}
    model = hf_folder(tmp_path / "tiny", echo, config)
    unfit = adapter(tmp_path / "unfit", '{"peft_type": "IA3"}')
    process = command(str(model), "--cache", str(tmp_path / "cache"), f"--lora-modules=sql={unfit}")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    *_, reason = said.splitlines()
    if architecture == "llama":
        assert reason.startswith(f"pagefleet: The LoRA adapter 'sql': {unfit}/adapter_config.json ")
    else:
        assert "LoRA adapters are served with models of the architectures llama, " in reason
    assert not list((tmp_path / "cache/models").glob("tiny-*"))
