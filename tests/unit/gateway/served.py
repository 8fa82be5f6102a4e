"""The echo model, prepared, as a gateway serves it: the id of a byte is that byte."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from pagefleet_gateway.model import ServedModel
from pagefleet_worker.prepare import prepare


@cache
def echo_model() -> ServedModel:
    """Loaded once for all tests."""
    with TemporaryDirectory() as folder:
        return ServedModel.load(prepare("echo", Path(folder)))
