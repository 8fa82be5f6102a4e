"""A model in Hugging Face's layout: config.json, tokenizer files, safetensors."""

import json
from pathlib import Path
from typing import Any

from pagefleet.manifest import Weights
from pagefleet_worker.model_files import ModelError, ModelFiles


def hf_model(folder: Path, name: str) -> ModelFiles:
    """The model in `folder`; its tokenizer is the one that transformers' AutoTokenizer makes."""
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder} lacks config.json: it is no model in Hugging Face's layout.")
    weights = _weight_files(folder)
    tokenizer = _auto_tokenizer(folder)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return ModelFiles(
        name=name,
        config=_with_common_names(config),
        tokenizer=tokenizer.backend_tokenizer,
        weights=Weights("safetensors", weights),
        special_tokens={key: str(token) for key, token in tokenizer.special_tokens_map.items()},
        chat_template=template,
        generation_config=_read_json(folder / "generation_config.json") or {},
    )


def _with_common_names(config: dict[str, Any]) -> dict[str, Any]:
    """Some architectures have names of their own for what others name alike: n_positions, n_ctx."""
    from transformers import CONFIG_MAPPING

    architecture = config.get("model_type")
    own = CONFIG_MAPPING[architecture].attribute_map if architecture in CONFIG_MAPPING else {}
    names = {name: own.get(name) for name in ("vocab_size", "max_position_embeddings")}
    return {name: config[theirs] for name, theirs in names.items() if theirs in config} | config


def _weight_files(folder: Path) -> tuple[str, ...]:
    """The files that the index names, or the one that needs none.

    Others are not the model's: some publishers keep the same weights in a second form beside them.
    """
    index = _read_json(folder / "model.safetensors.index.json")
    names = {"model.safetensors"} if index is None else set(index.get("weight_map", {}).values())
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing or not names:
        raise ModelError(
            f"{folder} lacks its weights, {', '.join(missing) or 'which its index does not name'}. "
            "Save the model with save_pretrained(folder); pickled weights are never read."
        )
    return tuple(str(folder.resolve() / name) for name in sorted(names))


def _auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ModelError(f"transformers cannot load the tokenizer in {folder}: {reason}") from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"The tokenizer in {folder} exists only in transformers' own Python code. Save it "
            "as a tokenizer.json of the `tokenizers` library beside the weights."
        )
    return tokenizer


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.")
    return value
