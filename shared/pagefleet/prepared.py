"""From whatever names a model to the prepared folder from which services read it."""

import subprocess
import sys
from pathlib import Path

from pagefleet.manifest import MANIFEST_FILE, ManifestError
from pagefleet.settings import AUTO, ModelSettings


def preparation(settings: ModelSettings) -> list[str]:
    """The worker's program that prepares the settings' model; its output is the folder's path."""
    options = [
        f"--tokenizer={settings.tokenizer}",
        f"--generation-config={settings.generation_config}",
    ]
    if settings.lora_modules is not None:
        options.append(f"--lora-modules={settings.lora_modules}")
    return [sys.executable, "-m", "pagefleet_worker.prepare", *options, settings.model]


def prepared_folder(settings: ModelSettings) -> Path:
    """The prepared folder that the settings' model is, or that the worker's program makes of it.

    Raises:
        ManifestError: it could not be prepared; the program said why on standard error.
    """
    folder = Path(settings.model)
    is_all_its_own = settings.tokenizer == settings.generation_config == AUTO
    if is_all_its_own and settings.lora_modules is None and (folder / MANIFEST_FILE).exists():
        return folder
    done = subprocess.run(preparation(settings), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ManifestError(f"the model {settings.model!r} could not be prepared.")
    return Path(done.stdout.strip().splitlines()[-1])
