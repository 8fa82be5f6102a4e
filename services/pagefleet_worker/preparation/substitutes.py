"""What an operator puts in place of parts of a model, or beside it, before it is prepared.

A tokenizer brings its special tokens and its chat template; where it says nothing of them, the
model's own stay. A generation config is all that is recommended for a model: what holds where a
request is silent, and which ids end a generation. LoRA adapters are looked through, so that one
that cannot be served is refused before anything starts.
"""

from dataclasses import replace
from pathlib import Path

from pagefleet.manifest import GENERATION_CONFIG_FILE, Adapter, SamplingDefaults
from pagefleet_worker.model_files import ModelError, ModelFiles, read_json


def with_tokenizer(files: ModelFiles, path: Path) -> ModelFiles:
    """The model with the tokenizer of a folder, or of a tokenizer.json.

    Raises:
        ModelError: it cannot be read.
    """
    from pagefleet_worker.preparation.hf_tokenizer import hf_tokenizer

    other = hf_tokenizer(path)
    return replace(
        files,
        tokenizer=other.tokenizer,
        special_tokens=files.special_tokens | other.special_tokens,
        chat_template=other.chat_template or files.chat_template,
    )


def with_generation_config(files: ModelFiles, folder: Path) -> ModelFiles:
    """The model with the generation config that lies in a folder.

    Raises:
        ModelError: none lies there, or it is no JSON object.
    """
    config = read_json(folder / GENERATION_CONFIG_FILE)
    if config is None:
        raise ModelError(f"{folder} lacks {GENERATION_CONFIG_FILE}, which was to be taken from it.")
    return replace(files, generation_config=config)


def with_neutral_sampling(files: ModelFiles) -> ModelFiles:
    """The model without recommendations for sampling; what ends a generation stays."""
    recommended = SamplingDefaults.__struct_fields__
    config = {name: v for name, v in files.generation_config.items() if name not in recommended}
    return replace(files, generation_config=config)


def with_adapters(files: ModelFiles, adapters: tuple[Adapter, ...]) -> ModelFiles:
    """The model with LoRA adapters beside it. Those of a model without weights may be any folders.

    Raises:
        ModelError: one cannot be served with this model.
    """
    if files.weights.kind != "none":
        _check_adapters(files, adapters)
    return replace(files, adapters=adapters)


def _check_adapters(files: ModelFiles, adapters: tuple[Adapter, ...]) -> None:
    from pagefleet_worker.model.config import ARCHITECTURES, parse_config
    from pagefleet_worker.model.lora import read_adapter

    if (architecture := files.config.get("model_type")) not in ARCHITECTURES:
        raise ModelError(
            f"LoRA adapters are served with models of the architectures {', '.join(ARCHITECTURES)},"
            f" not of {architecture!r}: merge the adapter into the model, and serve that."
        )
    config = parse_config(files.config)
    for adapter in adapters:
        try:
            read_adapter(Path(adapter.folder), config)
        except ModelError as error:
            raise ModelError(f"The LoRA adapter {adapter.name!r}: {error}") from error
