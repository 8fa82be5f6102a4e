"""A model in GGUF (ggml, docs/gguf.md): config, tokenizer and chat template out of its metadata."""

from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from pagefleet.manifest import Weights
from pagefleet_worker.checkpoints.gguf_file import read_gguf_parts
from pagefleet_worker.model_files import ModelFiles
from pagefleet_worker.preparation.gguf_config import gguf_config
from pagefleet_worker.preparation.gguf_parts import gguf_parts
from pagefleet_worker.preparation.gguf_tokenizer import gguf_tokenizer
from pagefleet_worker.preparation.gguf_vocabulary import gguf_vocabulary


class _Pooling(IntEnum):
    """`<architecture>.pooling_type` of a model for embeddings."""

    NONE = 0
    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


def gguf_model(path: Path, name: str, *, own_tokenizer: bool = True) -> ModelFiles:
    """The model in the GGUF file `path`, and in the others if it is a part; a ModelError names what
    in it cannot be served. Without its `own_tokenizer`, which then may be of any kind, an empty one
    waits for its substitute.
    """
    paths = gguf_parts(path)
    file = read_gguf_parts(paths)
    metadata = file.metadata
    config, vocabulary = gguf_config(metadata, file.tensors), gguf_vocabulary(metadata)
    roles = vocabulary.roles
    architecture = metadata["general.architecture"]
    named = {
        f"{role}_token": vocabulary.tokens[roles[role]] for role in ("bos", "eos") if role in roles
    }
    return ModelFiles(
        name=name,
        config=config,
        tokenizer=gguf_tokenizer(vocabulary, architecture) if own_tokenizer else Tokenizer(BPE()),
        weights=Weights("gguf", tuple(str(path.resolve()) for path in paths)),
        special_tokens=named,
        chat_template=metadata.get("tokenizer.chat_template"),
        end_of_turn_ids=vocabulary.ends_of_turns,
        embeds=_pooling(metadata) in (_Pooling.NONE, _Pooling.LAST),
    )


def _pooling(metadata: dict[str, Any]) -> int:
    pooling: int = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    return pooling
