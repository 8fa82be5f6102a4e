"""`--lora-modules`: the LoRA adapters that are served beside a model, in either form of vLLM's.

sql=/adapters/sql,poet=/adapters/poet
{"name": "sql", "path": "/adapters/sql"}, {"name": "poet", "path": "/adapters/poet"}
"""

from collections import Counter

import msgspec


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str


def lora_modules(text: str) -> dict[str, str]:
    """Folders by the names under which clients ask for their adapters, in the order of the text.

    Raises:
        ValueError: it is malformed, or a name cannot be one or is there twice.
    """
    modules = _from_json(text) if text.lstrip()[:1] in ("{", "[") else _from_pairs(text)
    names = Counter(module.name for module in modules)
    for name, count in names.items():
        if not name.strip() or name != name.strip() or not name.isprintable():
            raise ValueError(f"{name!r} is no name for a LoRA adapter: printable, not empty")
        if count > 1:
            raise ValueError(f"the LoRA adapter {name!r} is there {count} times")
    return {module.name: module.path for module in modules}


def parse_lora_modules(text: str) -> str:
    """The text itself, if it names adapters.

    Raises:
        ValueError: it does not.
    """
    lora_modules(text)
    return text


def _from_json(text: str) -> list[_Module]:
    listed = text if text.lstrip()[0] == "[" else f"[{text}]"
    try:
        return msgspec.json.decode(listed, type=list[_Module])
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{text!r} does not name LoRA adapters: {error}; write for example "
            '{"name": "sql", "path": "/adapters/sql"}'
        ) from error


def _from_pairs(text: str) -> list[_Module]:
    modules = []
    for pair in text.split(","):
        name, _, path = pair.partition("=")
        if not path.strip():
            raise ValueError(
                f"{pair.strip()!r} names no LoRA adapter and its folder; write for example "
                "sql=/adapters/sql,poet=/adapters/poet"
            )
        modules.append(_Module(name.strip(), path.strip()))
    return modules
