"""Which files a GGUF model consists of: one, or the parts that llama-gguf-split makes of it, named
`model-00001-of-00003.gguf` and so on. What is in them is seen later (`checkpoints.gguf_file`).
"""

import re
from pathlib import Path

from pagefleet_worker.model_files import ModelError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
"""A part's stem: the model's, its number, counting from 1, and how many there are."""


def gguf_name(path: Path) -> str:
    """What the model is called of which `path` is the file, or a part."""
    part = _PART.fullmatch(path.stem)
    return part[1] if part else path.stem


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """All files of that model, in their order.

    Raises:
        ModelError: some are not beside it.
    """
    part = _PART.fullmatch(path.stem)
    if part is None:
        return (path,)
    count = int(part[3])
    parts = tuple(
        path.with_stem(f"{part[1]}-{number:05}-of-{count:05}") for number in range(1, count + 1)
    )
    if path not in parts:
        raise ModelError(f"{path} is no part of {count}, by its name: rename or download it again.")
    if missing := [each.name for each in parts if not each.is_file()]:
        raise ModelError(
            f"{path} is one of {count} files of a model, and {path.parent} lacks "
            f"{', '.join(missing)}. Put all of them into one folder."
        )
    return parts


def gguf_in(folder: Path) -> Path | None:
    """The file, or a part, of the only GGUF model in a folder; None if that holds another kind of
    model, or nothing.

    Raises:
        ModelError: it holds several.
    """
    found = sorted(folder.glob("*.gguf"))
    if not found or any(folder.glob("*.safetensors")):
        return None
    if len(names := sorted({gguf_name(path) for path in found})) > 1:
        raise ModelError(
            f"{folder} holds {len(names)} GGUF models ({', '.join(names)}): name a file of one."
        )
    return found[0]
