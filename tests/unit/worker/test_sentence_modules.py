"""What folders in the layout of sentence-transformers say of embeddings."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagefleet_worker.model_files import ModelError
from pagefleet_worker.preparation.sentence_modules import is_last_token_embedding


def folder_of(folder: Path, modules: list[str], pooling: dict[str, Any] | None) -> Path:
    listed = [
        {"idx": number, "path": "" if number == 0 else f"{number}_{name}", "type": f"a.b.{name}"}
        for number, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


LAST = {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "include_prompt": True}


@pytest.mark.parametrize(
    ("modules", "pooling", "holds"),
    [
        (["Transformer", "Pooling", "Normalize"], LAST, True),
        (["Transformer", "Pooling"], {"pooling_mode": "lasttoken"}, True),
        (["Transformer", "Pooling"], {"pooling_mode": "mean"}, False),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True}, False),
        (["Transformer", "Pooling"], LAST | {"pooling_mode_mean_tokens": True}, False),
        (["Transformer", "Pooling"], LAST | {"pooling_mode_mean_tokens": False}, True),
        (["Transformer", "Pooling"], None, False),
        (["Transformer", "Pooling", "Dense", "Normalize"], LAST, False),
        (["Transformer"], None, True),
    ],
)
def test_last_tokens_alone_are_known(
    modules: list[str], pooling: dict[str, Any] | None, holds: bool, tmp_path: Path
) -> None:
    assert is_last_token_embedding(folder_of(tmp_path, modules, pooling)) == holds


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert is_last_token_embedding(tmp_path)


def test_a_list_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(ModelError, match="does not list modules"):
        is_last_token_embedding(tmp_path)
