"""The manifest of a prepared model: what every service must know about it without its weights.

A model is prepared once into a folder of small files (`pagefleet.json`, `config.json`,
`tokenizer.json`, and if the model has them `chat_template.jinja` and `generation_config.json`);
this module is the format of the first. The weights stay where they are, and are named by path.
"""

from pathlib import Path
from typing import Literal, Self

import msgspec

FORMAT_VERSION = 2
"""One more whenever other folders are made of the same model, whose older ones are made again."""

MANIFEST_FILE = "pagefleet.json"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_CONFIG_FILE = "generation_config.json"

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"


class ManifestError(ValueError):
    """A folder whose manifest is missing, malformed or of another format version."""


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the weights are: absolute paths, all of one kind; none for a model without weights."""

    kind: Literal["safetensors", "gguf", "none"]
    paths: tuple[str, ...] = ()


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter (Hu et al. 2021) that is served beside the model, under its own name.

    folder: absolute; it holds `ADAPTER_CONFIG_FILE` and `ADAPTER_WEIGHTS_FILE`, as PEFT writes
    them, unless the model has no weights.
    """

    name: str
    folder: str


class SamplingDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the model's authors recommend if a request does not say; None: they do not either."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Manifest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """A prepared model.

    name: what clients call it. architecture: the `model_type` of its config. vocab_size: rows of
    the embedding, at least as many as the tokenizer knows. max_model_len: tokens of prompt and
    output together. bos_token, eos_token: what the chat template is given under these names.
    eos_token_ids: every id that ends a generation. fingerprint: hexadecimal SHA-256, the same in
    all processes that serve this model. writes: whether it has a head, which chooses tokens.
    embeds: whether, as far as is known, its embeddings are the last tokens' hidden states.
    adapters: in the order in which `SamplingParams.adapter` counts them.
    """

    format_version: int
    name: str
    architecture: str
    weights: Weights
    vocab_size: int
    max_model_len: int
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    fingerprint: str
    writes: bool = True
    embeds: bool = True
    adapters: tuple[Adapter, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The manifest in `folder`; a ManifestError says how to mend what is wrong with it."""
        path = folder / MANIFEST_FILE
        mend = "Prepare the model again: pagefleet prepare MODEL."
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise ManifestError(
                f"{folder} is no prepared model: it lacks {path.name}. {mend}"
            ) from None
        try:
            version = msgspec.json.decode(content, type=_Version).format_version
            if version != FORMAT_VERSION:
                raise ManifestError(
                    f"{path} has format version {version}, but this Pagefleet reads version "
                    f"{FORMAT_VERSION}. {mend}"
                )
            return msgspec.json.decode(content, type=cls)
        except msgspec.DecodeError as error:
            raise ManifestError(f"{path} is malformed: {error}. {mend}") from error

    def save(self, folder: Path) -> None:
        """Write the manifest into `folder`, which exists."""
        content = msgspec.json.format(msgspec.json.encode(self), indent=2)
        (folder / MANIFEST_FILE).write_bytes(content + b"\n")


class _Version(msgspec.Struct):
    format_version: int
