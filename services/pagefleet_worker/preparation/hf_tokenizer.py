"""A tokenizer in Hugging Face's layout: a folder that transformers reads, or one tokenizer.json."""

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from pagefleet_worker.model_files import ModelError, read_json


@dataclass(frozen=True)
class HFTokenizer:
    """A tokenizer, and what lies beside it: see `ModelFiles`."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None


def hf_tokenizer(path: Path) -> HFTokenizer:
    """That of a folder is the one that AutoTokenizer makes; a file says nothing beyond itself.

    Raises:
        ModelError: it cannot be read, or exists in Python only.
    """
    return _file_tokenizer(path) if path.is_file() else _folder_tokenizer(path)


def _file_tokenizer(path: Path) -> HFTokenizer:
    if "model" not in (read_json(path) or {}):
        raise ModelError(f"{path} is no tokenizer.json of the `tokenizers` library.")
    return HFTokenizer(Tokenizer.from_file(str(path)))


def _folder_tokenizer(folder: Path) -> HFTokenizer:
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
    template = tokenizer.chat_template
    return HFTokenizer(
        tokenizer.backend_tokenizer,
        {key: str(token) for key, token in tokenizer.special_tokens_map.items()},
        template.get("default") if isinstance(template, dict) else template,
    )
