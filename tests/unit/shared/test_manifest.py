import json

import msgspec
import pytest

from pagefleet.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    Adapter,
    Manifest,
    ManifestError,
    SamplingDefaults,
    Weights,
)

MANIFEST = Manifest(
    format_version=FORMAT_VERSION,
    name="tiny",
    architecture="llama",
    weights=Weights("gguf", ("/models/tiny.gguf",)),
    vocab_size=300,
    max_model_len=128,
    bos_token=None,
    eos_token="</s>",
    eos_token_ids=(2, 7),
    sampling=SamplingDefaults(temperature=0.6, top_k=20),
    fingerprint="00ff",
)


@pytest.mark.parametrize("adapters", [(), (Adapter("sql", "/a"), Adapter("poet", "/b"))])
def test_what_is_saved_is_loaded(tmp_path, adapters):
    manifest = msgspec.structs.replace(MANIFEST, adapters=adapters)
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest


def test_what_is_usual_is_not_said(tmp_path):
    """So that a Pagefleet of before reads it."""
    MANIFEST.save(tmp_path)
    said = json.loads((tmp_path / MANIFEST_FILE).read_text())
    assert said.keys().isdisjoint({"writes", "embeds", "adapters"})


def test_a_folder_without_one_is_no_prepared_model(tmp_path):
    with pytest.raises(ManifestError, match=r"lacks pagefleet\.json\. Prepare the model again"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format_version": 99}, "format version 99, but this Pagefleet reads"),
        ({"format_version": "new"}, "malformed: Expected `int`"),
        ({"colour": "blue"}, "unknown field `colour`"),
        ({"vocab_size": "many"}, "Expected `int`, got `str`"),
        ({"weights": {"kind": "pickle", "paths": []}}, "Invalid enum value 'pickle'"),
    ],
)
def test_what_is_wrong_with_it_is_said(tmp_path, change, reason):
    content = json.loads(msgspec.json.encode(MANIFEST)) | change
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(ManifestError, match=reason):
        Manifest.load(tmp_path)


def test_a_file_that_is_not_json_is_malformed(tmp_path):
    (tmp_path / MANIFEST_FILE).write_bytes(b"\x80\x04pickle")
    with pytest.raises(ManifestError, match="malformed"):
        Manifest.load(tmp_path)
