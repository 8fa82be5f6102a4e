"""What a folder says of embeddings: the modules of sentence-transformers behind a model's layers.

`modules.json` lists them, each with a folder of its own; models that are meant for embeddings have
it. What is done here (`embedding`) is what two of them make of the layers' output: `Pooling` by the
last token, and `Normalize`. Of all others the embeddings would be wrong without a word.
"""

from pathlib import Path

import msgspec

from pagefleet_worker.model_files import ModelError, read_json

_LAST_TOKEN = "lasttoken"
_MODE = "pooling_mode"
_SWITCHES = frozenset(
    {"cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens"}
    | {_LAST_TOKEN}
)


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def name(self) -> str:
        return self.type.rpartition(".")[2]


def is_last_token_embedding(folder: Path) -> bool:
    """Whether the embeddings of a model are the states of last tokens, as far as its folder says.

    Raises:
        ModelError: it cannot be read.
    """
    path = folder / "modules.json"
    try:
        modules = msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except FileNotFoundError:
        return True
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} does not list modules: {error}.") from error
    pooling = [folder / module.path for module in modules if module.name == "Pooling"]
    others = {module.name for module in modules} - {"Transformer", "Pooling", "Normalize"}
    return not others and all(_modes(each) == {_LAST_TOKEN} for each in pooling)


def _modes(folder: Path) -> set[str]:
    """How a module pools: older ones have a switch for each mode, newer ones name it."""
    said = read_json(folder / "config.json") or {}
    switched = {name.removeprefix(f"{_MODE}_") for name, on in said.items() if on is True}
    named = said.get(_MODE)
    return (switched & _SWITCHES) | ({named} if isinstance(named, str) else set())
