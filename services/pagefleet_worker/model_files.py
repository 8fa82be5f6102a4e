"""The small files of a prepared model, gathered from any source and written into one folder."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pagefleet.manifest import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    CHAT_TEMPLATE_FILE,
    CONFIG_FILE,
    FORMAT_VERSION,
    GENERATION_CONFIG_FILE,
    TOKENIZER_FILE,
    Adapter,
    Manifest,
    SamplingDefaults,
    Weights,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_IDENTITY_BYTES = 1 << 20


class ModelError(ValueError):
    """A model that cannot be served as it is; the message says what is missing or unknown."""


@dataclass(frozen=True)
class ModelFiles:
    """What one source says of a model.

    config: in Hugging Face's terms. special_tokens: `bos_token`, `eos_token` and the others that
    the tokenizer names, as text. end_of_turn_ids: ids that end a chat turn beyond those that
    config, generation_config and `eos_token` name. writes, embeds, adapters: see `Manifest`.
    """

    name: str
    config: dict[str, Any]
    tokenizer: "Tokenizer"
    weights: Weights
    special_tokens: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    end_of_turn_ids: tuple[int, ...] = ()
    writes: bool = True
    embeds: bool = True
    adapters: tuple[Adapter, ...] = ()

    def write(self, folder: Path) -> None:
        """Write the prepared model into `folder`, which exists and is empty."""
        _write_json(folder / CONFIG_FILE, self.config)
        tokenizer = self._fitting_tokenizer().to_str(pretty=True)
        (folder / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
        if self.chat_template is not None:
            (folder / CHAT_TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")
        if self.generation_config:
            _write_json(folder / GENERATION_CONFIG_FILE, self.generation_config)
        self._manifest(fingerprint(folder, self.weights, self.adapters)).save(folder)

    def _manifest(self, fingerprint: str) -> Manifest:
        return Manifest(
            format_version=FORMAT_VERSION,
            name=self.name,
            architecture=self._required("model_type"),
            weights=self.weights,
            vocab_size=self._required("vocab_size"),
            max_model_len=self._required("max_position_embeddings"),
            bos_token=self.special_tokens.get("bos_token"),
            eos_token=self.special_tokens.get("eos_token"),
            eos_token_ids=self._eos_token_ids(),
            sampling=self._sampling_defaults(),
            fingerprint=fingerprint,
            writes=self.writes,
            embeds=self.embeds,
            adapters=self.adapters,
        )

    def _required(self, key: str) -> Any:
        if key not in self.config:
            raise ModelError(
                f"The config of {self.name} lacks {key!r}: only models that generate text from "
                "text, with their fields at the top of config.json, can be served."
            )
        return self.config[key]

    def _fitting_tokenizer(self) -> "Tokenizer":
        """Without the added tokens, for images or padding, that the model has no row for."""
        size = self._required("vocab_size")
        last = max(self.tokenizer.get_vocab(with_added_tokens=False).values(), default=0)
        if last >= size:
            raise ModelError(
                f"The tokenizer for {self.name} has a token {last}, and the model only {size} of "
                "them: it is the tokenizer of another model. Name one that fits with --tokenizer."
            )
        if max(self.tokenizer.get_added_tokens_decoder(), default=0) < size:
            return self.tokenizer
        content = json.loads(self.tokenizer.to_str())
        content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < size]
        return type(self.tokenizer).from_str(json.dumps(content))

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids: list[int] = []
        for source in (self.generation_config, self.config):
            named = source.get("eos_token_id")
            ids += named if isinstance(named, list) else [named] if named is not None else []
        if (eos_token := self.special_tokens.get("eos_token")) is not None:
            eos_id = self.tokenizer.token_to_id(eos_token)
            ids += [eos_id] if eos_id is not None else []
        return tuple(dict.fromkeys([*ids, *self.end_of_turn_ids]))

    def _sampling_defaults(self) -> SamplingDefaults:
        names = SamplingDefaults.__struct_fields__
        said = {name: self.generation_config.get(name) for name in names}
        try:
            return msgspec.convert(said, SamplingDefaults)
        except msgspec.ValidationError as error:
            raise ModelError(
                f"The generation_config of {self.name} is malformed: {error}. Correct or remove it."
            ) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is no such file.

    Raises:
        ModelError: it holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.")
    return value


def open_safetensors(path: str | Path, framework: Literal["np", "pt"]) -> Any:
    """The file, mapped into memory; its tensors are of `framework`.

    Raises:
        ModelError: it is damaged, or no such file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework=framework)
    except SafetensorError as error:
        raise ModelError(
            f"{path} is no safetensors file: {error}. Download or save it again."
        ) from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def fingerprint(folder: Path, weights: Weights, adapters: tuple[Adapter, ...]) -> str:
    """SHA-256 over config, tokenizer and the size, first and last MiB of each weight file; and over
    the names of adapters, in their order, and the same of their files.
    """
    digest = hashlib.sha256(f"pagefleet model {FORMAT_VERSION} {weights.kind}".encode())
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    for path in weights.paths:
        digest.update(_marks(Path(path)))
    for adapter in adapters:
        digest.update(hashlib.sha256(adapter.name.encode()).digest())
        files = [Path(adapter.folder, name) for name in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)]
        for file in filter(Path.exists, files):  # none need be there for a model without weights
            digest.update(_marks(file))
    return digest.hexdigest()


def check_unchanged(folder: Path, manifest: Manifest) -> None:
    """Refuse files that are others than when they were prepared: under one fingerprint all workers
    of a cell compute the same.

    Raises:
        ModelError: they are others.
    """
    if fingerprint(folder, manifest.weights, manifest.adapters) != manifest.fingerprint:
        raise ModelError(
            f"The weights or LoRA adapters of {manifest.name} have changed since {folder} was "
            "made from them: start pagefleet serve again with the model's own name or folder, "
            "or pagefleet prepare."
        )


def _marks(path: Path) -> bytes:
    """What tells a large file from others, without all of it being read."""
    with open(path, "rb") as file:
        head = file.read(_IDENTITY_BYTES)
        size = file.seek(0, 2)
        file.seek(max(0, size - _IDENTITY_BYTES))
        tail = file.read()
    return (
        size.to_bytes(8, "little") + hashlib.sha256(head).digest() + hashlib.sha256(tail).digest()
    )
