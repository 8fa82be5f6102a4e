"""A model in Hugging Face's layout: config.json, tokenizer files, safetensors."""

from pathlib import Path
from typing import Any

from pagefleet.manifest import CONFIG_FILE, GENERATION_CONFIG_FILE, Weights
from pagefleet_worker.checkpoints.formats import format_of
from pagefleet_worker.model.config import ARCHITECTURES
from pagefleet_worker.model.families import FAMILIES
from pagefleet_worker.model_files import ModelError, ModelFiles, open_safetensors, read_json
from pagefleet_worker.preparation.hf_tokenizer import hf_tokenizer
from pagefleet_worker.preparation.sentence_modules import is_last_token_embedding

_OWN_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of AutoGPTQ and AutoAWQ, for folders whose config.json does not say that."""

_TEXT_MODELS = {"gemma3": "gemma3_text"}
"""Architectures that see, and those of their text models, by `model_type`."""

_EMBEDDING = "embed_tokens.weight"
"""Its name where there is nothing around the layers."""


def hf_model(folder: Path, name: str) -> ModelFiles:
    """The model in `folder`; its tokenizer is the one that transformers' AutoTokenizer makes."""
    config = read_json(folder / CONFIG_FILE)
    if config is None:
        raise ModelError(f"{folder} lacks config.json: it is no model in Hugging Face's layout.")
    if not isinstance(kind := config.get("model_type", ""), str):
        raise ModelError(f"The model_type in {folder / CONFIG_FILE} is {kind!r}, not a name.")
    config = _with_quantization(_of_text(config), folder)
    if config.get("model_type") in ARCHITECTURES:
        format_of(config)  # what cannot be read is refused now
    weights = _weight_files(folder)
    writes = _has_head(config, weights)
    if not writes:  # so that there is one to load; nobody asks it
        config = config | {"tie_word_embeddings": True}
    own = hf_tokenizer(folder)
    return ModelFiles(
        name=name,
        config=_with_common_names(config),
        tokenizer=own.tokenizer,
        weights=Weights("safetensors", weights),
        special_tokens=own.special_tokens,
        chat_template=own.chat_template,
        generation_config=read_json(folder / GENERATION_CONFIG_FILE) or {},
        writes=writes,
        embeds=is_last_token_embedding(folder),
    )


def _of_text(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model, where another sees for it."""
    if config.get("model_type") not in _TEXT_MODELS or "text_config" not in config:
        return config
    shared = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config")
    outer = {name: config[name] for name in shared if name in config}
    return {**config["text_config"], **outer, "model_type": _TEXT_MODELS[config["model_type"]]}


def _with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Tools once wrote how they quantize under another name, or into a file of their own."""
    named = {"compressed-tensors": config.get("compression_config")}
    named |= {method: read_json(folder / file) for file, method in _OWN_CONFIGS.items()}
    for method, values in named.items():
        if values is not None:
            return {"quantization_config": {"quant_method": method, **values}, **config}
    return config


def _with_common_names(config: dict[str, Any]) -> dict[str, Any]:
    """Some architectures have names of their own for what others name alike: n_positions, n_ctx."""
    from transformers import CONFIG_MAPPING

    architecture = config.get("model_type")
    own = CONFIG_MAPPING[architecture].attribute_map if architecture in CONFIG_MAPPING else {}
    names = {name: own.get(name) for name in ("vocab_size", "max_position_embeddings")}
    found = {name: config[theirs] for name, theirs in names.items() if theirs in config}
    silent = FAMILIES[architecture].reads if architecture in FAMILIES else {}
    return {name: silent[name] for name in names if name in silent} | found | config


def _has_head(config: dict[str, Any], weights: tuple[str, ...]) -> bool:
    """Not so where a model of the decoder's was saved for embeddings, as its layers alone."""
    if config.get("model_type") not in ARCHITECTURES or config.get("tie_word_embeddings"):
        return True
    files = [open_safetensors(path, "np") for path in weights]
    names = {name for file in files for name in file.keys()}  # noqa: SIM118
    return "lm_head.weight" in names or _EMBEDDING not in names


def _weight_files(folder: Path) -> tuple[str, ...]:
    """The files that the index names, or the one that needs none.

    Others are not the model's: some publishers keep the same weights in a second form beside them.
    """
    index = read_json(folder / "model.safetensors.index.json")
    names = {"model.safetensors"} if index is None else set(index.get("weight_map", {}).values())
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing or not names:
        raise ModelError(
            f"{folder} lacks its weights, {', '.join(missing) or 'which its index does not name'}. "
            "Save the model with save_pretrained(folder); pickled weights are never read."
        )
    return tuple(str(folder.resolve() / name) for name in sorted(names))
