"""From whatever names a model to the folder that services read it from."""

import subprocess
import sys
from pathlib import Path

from pagefleet.manifest import MANIFEST_FILE, ManifestError


def prepared_folder(model: str) -> Path:
    """The prepared folder that `model` is, or that the worker's program makes of it.

    Raises:
        ManifestError: it could not be prepared; the program said why on standard error.
    """
    folder = Path(model)
    if (folder / MANIFEST_FILE).exists():
        return folder
    command = [sys.executable, "-m", "pagefleet_worker.prepare", model]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ManifestError(f"the model {model!r} could not be prepared.")
    return Path(done.stdout.strip().splitlines()[-1])
