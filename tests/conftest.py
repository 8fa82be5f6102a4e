"""Fixtures that several folders of tests share."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import last_words

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch: as in pagefleet_worker/__main__.py

# As hypothesis does it where it sees that it runs in CI, but with examples of its own in every run.
# What `long` lengthens says tests/fuzz/budget.py.
for name in ("daily", "long"):
    settings.register_profile(
        name,
        deadline=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("daily")

for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:  # of `nohup` or `&`: children would inherit it,
        signal.signal(number, lambda *_: None)  # but get the default in the place of a handler


@pytest.hookimpl(optionalhook=True)  # of xdist, which need not be there
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from tests.distribution import PackageScheduling

    return PackageScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(last_words)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder, in Hugging Face's layout, of a variant of `tests.models`; each is made once."""
    from tests.models import make_model

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(scope="session")
def prepared_model(
    tmp_path_factory: pytest.TempPathFactory, small_model: Callable[[str], Path]
) -> Callable[[str], Path]:
    """The prepared folder of a variant of `tests.models`."""
    from pagefleet_worker.prepare import prepare

    cache = tmp_path_factory.mktemp("cache")
    return lambda name: prepare(str(small_model(name)), cache)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The prepared folder of SmolLM2-135M-Instruct, in the user's cache."""
    from pagefleet_worker.prepare import DEFAULT_MODEL, default_cache, prepare

    return prepare(DEFAULT_MODEL, default_cache())
